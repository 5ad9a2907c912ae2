"""From configuration to requests and their times."""

from itertools import islice
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.bench.config import BenchConfig, parse_objectives
from services.bench.plan import (
    FOREGROUND,
    WARMUP,
    RequestMaker,
    make_arrivals_s,
    make_foreground,
    make_warmup,
    plan_foreground,
)
from services.bench.prompts import BodyTemplate, TokenIdPrompts

URL = "http://127.0.0.1:9"
TRACE = (
    "arrived_at,num_prefill_tokens,num_decode_tokens\n"
    "0,600,5\n"
    "1,20,6\n"
    "3,700,7\n"
    "4,20,200\n"
)  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def maker(class_name: str = FOREGROUND, context_tokens: int | None = None) -> RequestMaker:
    return RequestMaker(class_name, TokenIdPrompts(0), BodyTemplate("completions", "m"), context_tokens)


def test_a_workload_picks_among_the_rows_of_a_trace_and_keeps_their_gaps(trace: Path) -> None:
    config = BenchConfig(URL, trace=trace, workload="hpld", trace_scale=4.0)
    plan = plan_foreground(config)
    made = list(make_foreground(config, plan, maker()))
    assert [(one.prompt_tokens, one.output_tokens) for one in made] == [(600, 5), (700, 7)]
    assert list(make_arrivals_s(config, plan)) == [0.0, 0.75]


def test_a_duration_ends_the_arrivals(trace: Path) -> None:
    config = BenchConfig(URL, trace=trace, duration_s=3.0)
    assert list(make_arrivals_s(config, plan_foreground(config))) == [0.0, 1.0]
    fixed = BenchConfig(URL, rate_per_s=2.0, arrivals="fixed", duration_s=2.0)
    assert list(make_arrivals_s(fixed, plan_foreground(fixed))) == [0.0, 0.5, 1.0, 1.5]


def test_a_rate_replaces_the_times_of_a_trace(trace: Path) -> None:
    config = BenchConfig(URL, trace=trace, rate_per_s=10.0, arrivals="fixed")
    assert list(islice(make_arrivals_s(config, plan_foreground(config)), 3)) == pytest.approx([0.0, 0.1, 0.2])


def test_warm_up_requests_have_the_lengths_but_not_the_content(trace: Path) -> None:
    config = BenchConfig(URL, trace=trace, concurrency=1, warmup=2)
    plan = plan_foreground(config)
    warm, real = list(make_warmup(config, plan, maker(WARMUP))), list(make_foreground(config, plan, maker()))
    assert [one.prompt_tokens for one in warm] == [one.prompt_tokens for one in real[:2]]
    assert all(one.body != other.body for one, other in zip(warm, real, strict=False))


def test_cut_requests_are_counted(trace: Path) -> None:
    config, cutting = BenchConfig(URL, trace=trace, concurrency=1), maker(context_tokens=500)
    made = list(make_foreground(config, plan_foreground(config), cutting))
    assert [one.prompt_tokens + one.output_tokens for one in made] == [500, 26, 500, 220]
    assert cutting.truncations.requests == 2
    assert cutting.truncations.prompt_tokens == 105 + 207


@pytest.mark.parametrize(
    ("rows", "changes", "key"),
    [
        (TRACE, {"requests": 9}, "--requests"),
        (TRACE, {"workload": "hphd"}, "--workload"),
        ("num_prefill_tokens,num_decode_tokens\n3,4\n", {}, "--trace"),
    ],
)
def test_a_trace_that_cannot_give_what_is_asked_names_the_option(
    tmp_path: Path, rows: str, changes: dict[str, int | str], key: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(rows)
    with pytest.raises(ConfigError) as caught:
        plan_foreground(BenchConfig(URL, trace=path, **changes))  # type: ignore[arg-type]
    assert caught.value.key == key


def test_objectives_are_read_in_seconds() -> None:
    objectives = parse_objectives("ttft=0.5, tpot=0.1,e2e=9")
    assert (objectives.ttft_s, objectives.tpot_s, objectives.tbt_s, objectives.end_to_end_s) == (
        0.5,
        0.1,
        None,
        9,
    )


@pytest.mark.parametrize("text", ["", "ttft", "ttft=fast", "ttft=0", "speed=1", "ttft=1,ttft=2", "tpot=nan"])
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_objectives(text)
