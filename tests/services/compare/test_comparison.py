"""Comparisons as files, and the same requests for every configuration of one."""

from itertools import islice
from pathlib import Path

import msgspec
import pytest

from common.errors import ConfigError
from common.service_classes import asked_class, service_classes_of
from services.bench.plan import FOREGROUND, RequestMaker, make_arrivals_s, make_foreground, plan_foreground
from services.bench.prompts import BodyTemplate, TokenIdPrompts
from services.compare.comparison import (
    Comparison,
    bench_config,
    check_comparison,
    choose,
    config_of,
    plan_of,
    read_comparison,
)

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(each for kind in ("comparison", "fidelity") for each in (ROOT / "bench").glob(f"{kind}*.toml"))
TEXT = """
name = "two"
[settings.instance]
engine = "emulated"
chunk_tokens = 128
[[workload]]
name = "mixed"
requests = 4
rate_per_s = 8.0
ttft_s = 1.0
tpot_s = 0.1
[[configuration]]
name = "plain"
instances = { prefill = 1, decode = 2 }
[[configuration]]
name = "other"
instances = { prefill = 2, decode = 1 }
knows_lengths = true
[configuration.settings.instance]
chunk_tokens = 256
"""
LENGTHS = Path("lengths.jsonl")
LATE_COSTS = """
[[workload]]
name = "lpld"
requests = 4
capacity_share = 0.85
ttft_s = 1.0
tpot_s = 0.1
[[workload]]
name = "late"
lengths = "lpld"
requests = 4
rate_per_s = 1.0
ttft_s = 1.0
tpot_s = 0.1
[[configuration]]"""


@pytest.fixture
def two(tmp_path: Path) -> Comparison:
    file = tmp_path / "two.toml"
    file.write_text(TEXT)
    return read_comparison(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_comparisons_that_are_kept_can_be_run(file: Path) -> None:
    comparison = read_comparison(file)
    assert len(comparison.configuration) > 1


def test_a_configuration_s_own_settings_come_over_those_of_all(two: Comparison) -> None:
    plain, other = (config_of(two, candidate, LENGTHS) for candidate in two.configuration)
    assert plain.instance.engine == other.instance.engine == "emulated"
    assert (plain.instance.chunk_tokens, other.instance.chunk_tokens) == (128, 256)
    assert (plain.predictor.kind, other.predictor.kind) == ("none", "oracle")
    assert other.predictor.lengths_file == LENGTHS
    plan = plan_of(two.configuration[0])
    assert (plan.prefill, plan.decode, plan.attention, plan.port) == (1, 2, 0, 0)


def test_a_mesh_is_told_what_its_workloads_are_promised(two: Comparison) -> None:
    offer = two.workload[0]
    config = config_of(two, two.configuration[0], LENGTHS)
    asked = dict(bench_config(two, offer, 8.0, 0, "http://127.0.0.1:1").extra_body)
    classes = service_classes_of(config)
    promised = classes[asked_class(classes, None, str(asked["service_tier"]))]
    assert (promised.ttft_s, promised.tpot_s) == (offer.ttft_s, offer.tpot_s)


def test_each_round_has_its_own_requests_whichever_configuration_gets_them(two: Comparison) -> None:
    def offered(round_number: int, url: str) -> list[tuple[bytes, float]]:
        config = bench_config(two, two.workload[0], 8.0, round_number, url)
        plan = plan_foreground(config)
        maker = RequestMaker(FOREGROUND, TokenIdPrompts(config.seed), BodyTemplate("completions", "m"), None)
        bodies = (request.body for request in make_foreground(config, plan, maker))
        return list(islice(zip(bodies, make_arrivals_s(config, plan), strict=False), 4))

    assert offered(0, "http://127.0.0.1:1") == offered(0, "http://127.0.0.1:2")
    assert offered(0, "http://127.0.0.1:1") != offered(1, "http://127.0.0.1:1")


def test_some_of_a_comparison_are_still_of_it(two: Comparison) -> None:
    chosen = choose(two, (), ("other",))
    assert [candidate.name for candidate in chosen.configuration] == ["other"]
    assert [offer.name for offer in chosen.workload] == ["mixed"]
    with pytest.raises(ConfigError, match="--workload = 'lpld': must be one of mixed"):
        choose(two, ("lpld",), ())
    with pytest.raises(ConfigError, match="--configuration = 'none': must be one of plain, other"):
        choose(two, (), ("none", "plain"))
    more_rounds = msgspec.structs.replace(two, rounds=9)
    assert more_rounds.fingerprint == two.fingerprint
    fitted = msgspec.structs.replace(two, costs=("mixed",), saturated="mixed")
    assert fitted.fingerprint == two.fingerprint
    assert msgspec.structs.replace(two, seed=1).fingerprint != two.fingerprint


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('name = "mixed"', 'name = "mix"', "workload.name"),
        ("requests = 4", "requests = 0", "workload.requests"),
        ('name = "other"', 'name = "plain"', "configuration.name"),
        ("[settings.instance]", '[settings.mesh]\nredis_url = "redis://x"\n[settings.instance]', "its own"),
        ("chunk_tokens = 256", "chunk_tokens = 0", "instance.chunk_tokens"),
        ("chunk_tokens = 256", "chunk_length = 1", "chunk_length"),
        ("decode = 2 }", "decode = 1000 }", "1000"),
        (
            "decode = 2 }",
            "decoder = 2 }",
            "configuration.0.instances.decoder = 2: is no key: must be one of prefill, decode, mixed, att",
        ),
        (
            "decode = 2 }",
            "decode = 'two' }",
            "configuration.0.instances.decode = 'two': must be a whole number",
        ),
        (
            "{ prefill = 1, decode = 2 }",
            "{ prefill = 1, decode = -1 }",
            "configuration.instances.decode = -1: of plain: must be at least 0",
        ),
        (
            "{ prefill = 1, decode = 2 }",
            "{ prefill = 1, attention = 1 }",
            "configuration.instances = .*: of plain: nobody would do decode",
        ),
        ("{ prefill = 1, decode = 2 }", "3", "configuration.0.instances = 3: must be a table"),
        (
            "knows_lengths = true",
            "rates_per_s = { mixed = 'x' }",
            "configuration.1.rates_per_s.mixed = 'x': must be a number",
        ),
        ("requests = 4", "requests = 'four'", "workload.0.requests = 'four': must be a whole number"),
        ("requests = 4", "request = 4", "workload.0.request = 4: is not a known key: did you mean requests"),
        ("requests = 4", "", "workload.0.requests must be given"),
        ('name = "two"', 'name = "two"\nrounds = 1.5', "rounds = 1.5: must be a whole number"),
        ('name = "two"', 'name = "two"\nlength_scale = 0', "length_scale"),
        ('name = "two"', 'name = "two"\ncosts = ["lpld"]', "costs = 'lpld'"),
        ('name = "two"', 'name = "two"\ncrowded = "mixed"', "crowded"),
        ('name = "two"', 'name = "two"\ncosts = ["mixed"]\nsaturated = "lpld"', "saturated = 'lpld'"),
        ('name = "two"', 'name = "two"\nsaturated = "mixed"', "must be one of costs"),
        (
            'name = "two"',
            'name = "two"\ncosts = ["mixed"]',
            r"costs = \['mixed'\]: must not be named beside emulated engines \(plain\): they wait",
        ),
        (
            'name = "two"\n[settings.instance]\nengine = "emulated"',
            'name = "two"\ncosts = ["mixed"]\n[settings.model]\nthreads = 2\n[settings.instance]',
            "model.threads = 2: must be 1 beside costs",
        ),
        (
            'name = "two"\n[settings.instance]\nengine = "emulated"',
            'name = "two"\ncosts = ["mixed"]\n[settings.instance]',
            "model.threads is not set: must be 1 beside costs",
        ),
        (
            'name = "two"\n[settings.instance]\nengine = "emulated"',
            'name = "two"\nprofiled_between = true\n[settings.instance]',
            "model.threads must be given beside profiled_between",
        ),
        ("knows_lengths = true", "rates_per_s = { lpld = 1.0 }", "rates_per_s = 'lpld'"),
        ("knows_lengths = true", "rates_per_s = { mixed = 0.0 }", "rates_per_s = 0.0"),
        ("rate_per_s = 8.0", "capacity_share = 0.0", "workload.capacity_share = 0.0"),
        ("rate_per_s = 8.0", "", "either rate_per_s or capacity_share"),
        ("rate_per_s = 8.0", "rate_per_s = 8.0\ncapacity_share = 0.5", "either rate_per_s or capacity_share"),
        ('name = "two"', 'name = "two"\ncapacity_requests = 0', "capacity_requests = 0"),
        ("[[configuration]]", LATE_COSTS, "workload = 'late': must come before lpld"),
    ],
)
def test_a_comparison_that_cannot_be_run_names_what_is_wrong(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    file = tmp_path / "wrong.toml"
    text = TEXT.replace(before, after, 1)
    file.write_text(
        text.replace('name = "two"', 'name = "two"\ncosts = ["late"]') if after is LATE_COSTS else text
    )
    with pytest.raises(ConfigError, match=said) as caught:
        read_comparison(file)
    assert str(caught.value).startswith(f"{file}: ")


def test_a_comparison_of_nothing_is_refused(two: Comparison) -> None:
    with pytest.raises(ConfigError, match="must have a workload and a configuration"):
        check_comparison(msgspec.structs.replace(two, configuration=()))
