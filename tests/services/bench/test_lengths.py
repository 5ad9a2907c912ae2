"""Length specifications, workloads and the cut to a context."""

import statistics
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from services.bench.lengths import (
    WORKLOADS,
    FixedLength,
    LengthMix,
    LengthPair,
    LogNormalLength,
    UniformLength,
    describe_length,
    fit_context,
    is_of_workload,
    parse_length,
    scale_length,
)


@pytest.mark.parametrize("text", ["128", "1:1", "64:256", "lognormal:100:0.5:4:2000"])
def test_a_specification_reads_back_as_itself(text: str) -> None:
    assert describe_length(parse_length("--prompt-tokens", text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-3",
        "5:4",
        "0:4",
        "1:2:3",
        "x",
        "lognormal:5",
        "lognormal:5:1:9:20",
        "lognormal:5:0:1:9",
        "1000000001",
        "1:99999999999999999999",
        "lognormal:1e12:1:4:2000000000000",
    ],
)
def test_a_wrong_specification_names_its_option(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_length("--output-tokens", text)
    assert (caught.value.key, caught.value.value) == ("--output-tokens", text)


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 2**32))
def test_draws_stay_within_their_bounds(lowest: int, spread: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    uniform = UniformLength(lowest, lowest + spread)
    lognormal = LogNormalLength(lowest + spread / 2, 0.7, lowest, lowest + spread + 1)
    for _ in range(20):
        assert lowest <= uniform.draw(generator) <= lowest + spread
        assert lowest <= lognormal.draw(generator) <= lowest + spread + 1


@pytest.mark.parametrize("name", ["lpld", "lphd", "hpld", "hphd"])
def test_a_workload_draws_only_its_own_kind(name: str) -> None:
    drawn = list(islice(WORKLOADS[name].draw_all(seed=3), 500))
    assert all(is_of_workload(pair, name) for pair in drawn)
    assert not any(
        is_of_workload(pair, other) for pair in drawn for other in WORKLOADS if other not in (name, "mixed")
    )


def test_the_mixture_looks_like_sharegpt() -> None:
    drawn = list(islice(WORKLOADS["mixed"].draw_all(seed=0), 20_000))
    shares = {name: sum(is_of_workload(pair, name) for pair in drawn) / len(drawn) for name in WORKLOADS}
    assert shares == pytest.approx(
        {"lpld": 0.20, "lphd": 0.67, "hpld": 0.03, "hphd": 0.10, "mixed": 1.0}, abs=0.02
    )
    # The sample that it is fitted to has means of 246 and 326 tokens.
    assert statistics.mean(pair.prompt_tokens for pair in drawn) == pytest.approx(246, rel=0.15)
    assert statistics.mean(pair.output_tokens for pair in drawn) == pytest.approx(326, rel=0.15)


def test_the_same_seed_draws_the_same_lengths() -> None:
    mix = LengthMix(((1.0, UniformLength(1, 1000), FixedLength(3)),))
    assert list(islice(mix.draw_all(5), 50)) == list(islice(mix.draw_all(5), 50))
    assert list(islice(mix.draw_all(5), 50)) != list(islice(mix.draw_all(6), 50))


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(2, 5_000))
def test_a_cut_request_fits_and_keeps_all_it_can(prompt: int, output: int, context: int) -> None:
    wanted = LengthPair(prompt, output)
    cut = fit_context(wanted, context)
    assert cut.prompt_tokens >= 1
    assert cut.output_tokens >= 1
    assert cut.prompt_tokens + cut.output_tokens <= context
    if prompt + output <= context:
        assert cut == wanted
    else:
        assert cut.prompt_tokens + cut.output_tokens == context


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0])
def test_scaled_workloads_are_as_long_as_their_factor_says_and_stay_disjoint(factor: float) -> None:
    light, heavy = (WORKLOADS[name].scaled(factor) for name in ("lpld", "hphd"))
    (drawn_light, drawn_heavy) = (list(islice(mix.draw_all(seed=2), 400)) for mix in (light, heavy))
    for field in ("prompt_tokens", "output_tokens"):
        assert max(getattr(pair, field) for pair in drawn_light) < min(
            getattr(pair, field) for pair in drawn_heavy
        )
        usual = statistics.median(
            getattr(pair, field) for pair in islice(WORKLOADS["hphd"].draw_all(seed=3), 400)
        )
        assert statistics.median(getattr(pair, field) for pair in drawn_heavy) == pytest.approx(
            factor * usual, rel=0.15
        )


def test_a_length_scaled_to_nearly_nothing_is_still_one_token() -> None:
    for length in (FixedLength(3), UniformLength(5, 9), LogNormalLength(50.0, 1.0, 4, 100)):
        scaled = scale_length(length, 0.001)
        assert scaled.draw(np.random.default_rng(0)) == 1
