from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import SampledToken, SamplingParams
from common.model.sampling import SamplingRow, sample, uniform

VOCAB = 2500


def some_logits(rows: int, seed: int, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def row(output_ids: tuple[int, ...] = (), prompt_ids: tuple[int, ...] = (1,), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=99, **params), prompt_ids, output_ids, (2,))


def drawn(logits: torch.Tensor, sampling_row: SamplingRow) -> int:
    return sample(logits.unsqueeze(0), [sampling_row])[0].token_id


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = some_logits(3, 0)
    tokens = sample(logits, [row(temperature=0.0)] * 3)
    assert tokens == [SampledToken(token_id) for token_id in logits.argmax(-1).tolist()]


def test_every_row_needs_its_parameters() -> None:
    with pytest.raises(ValueError, match="3 rows of logits for 2"):
        sample(some_logits(3, 0), [row()] * 2)


@given(st.integers(0, 2**63), st.integers(0, 10_000))
def test_the_uniform_number_is_a_fraction_fixed_by_seed_and_position(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0
    assert uniform(seed, position) == uniform(seed, position)
    assert uniform(seed, position) != uniform(seed, position + 1)
    assert uniform(seed, position) != uniform(seed + 1, position)


def test_uniform_numbers_spread_evenly() -> None:
    counts = [0] * 10
    for position in range(5000):
        counts[int(uniform(5, position) * 10)] += 1
    assert all(400 < count < 600 for count in counts)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    position=st.integers(0, 50),
    top_k=st.sampled_from([0, 1, 3, 40, VOCAB, 2 * VOCAB]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    spread=st.sampled_from([0.01, 2.0]),
)
def test_a_draw_stays_within_the_filters(
    seed: int, position: int, top_k: int, top_p: float, min_p: float, temperature: float, spread: float
) -> None:
    logits = some_logits(1, seed, spread=spread)[0]
    token = drawn(
        logits,
        row(
            output_ids=(5,) * position,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            temperature=temperature,
        ),
    )
    assert token in support(logits, top_k, top_p, min_p, temperature)


def support(logits: torch.Tensor, top_k: int, top_p: float, min_p: float, temperature: float) -> set[int]:
    """The definition: the k likeliest; of these the fewest that reach mass p; of these what reaches min-p."""
    probabilities = (logits.double() / temperature).softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    kept = order[: top_k or VOCAB]
    mass = sum(float(probabilities[token]) for token in kept)
    within: list[int] = []
    reached = 0.0
    for token in kept:
        if within and reached >= top_p + 1e-6:
            break
        within.append(token)
        reached += float(probabilities[token]) / mass
    least = max(float(probabilities[within[-1]]), min_p * float(probabilities[order[0]]))
    return {token for token in order if float(probabilities[token]) >= least * (1 - 1e-5)}


def test_every_token_of_the_support_is_drawn_as_often_as_it_should() -> None:
    logits = torch.full((VOCAB,), -50.0)
    logits[[3, 8, 9]] = torch.tensor([0.5, 0.3, 0.2]).log()
    counts = {3: 0, 8: 0, 9: 0}
    for position in range(2000):
        counts[drawn(logits, row(output_ids=(1,) * position, seed=4))] += 1
    assert abs(counts[3] - 1000) < 100
    assert abs(counts[8] - 600) < 100
    assert abs(counts[9] - 400) < 100


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 500), st.permutations(range(6)))
def test_a_draw_depends_on_nobody_beside_it(seed: int, order: list[int]) -> None:
    logits = some_logits(6, seed)
    rows = [
        row(temperature=0.0),
        row(seed=1),
        row(seed=1, top_p=0.8),
        row(seed=2, top_k=5, output_ids=(4, 5)),
        row(seed=3, repetition_penalty=1.4, output_ids=(7,)),
        row(seed=4, min_p=0.1, presence_penalty=1.0, output_ids=(7,)),
    ]
    together = [token.token_id for token in sample(logits, rows)]
    assert together == [drawn(logits[i], rows[i]) for i in range(6)]
    shuffled = [token.token_id for token in sample(logits[order], [rows[i] for i in order])]
    assert shuffled == [together[i] for i in order]


def test_a_flat_distribution_is_drawn_from_everywhere() -> None:
    logits = some_logits(1, 5, vocab=20_000, spread=0.01)[0]
    tokens = {drawn(logits, row(output_ids=(1,) * position, top_p=0.99)) for position in range(60)}
    assert len(tokens) > 50
    assert max(tokens) - min(tokens) > 10_000


@settings(deadline=None, max_examples=30)
@given(
    output_ids=st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple),
    prompt_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6).map(tuple),
    repetition=st.sampled_from([1.0, 0.5, 1.8]),
    presence=st.sampled_from([0.0, 1.5, -1.0]),
    frequency=st.sampled_from([0.0, 0.7]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0, 100.0]), max_size=3),
)
def test_penalties_and_bias_follow_their_definition(
    output_ids: tuple[int, ...],
    prompt_ids: tuple[int, ...],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    logits = some_logits(1, len(output_ids))[0]
    expected = logits.clone()
    for token in {*output_ids, *prompt_ids}:
        expected[token] = (
            expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        )
    for token in set(output_ids):
        expected[token] -= presence + frequency * output_ids.count(token)
    for token, value in bias.items():
        expected[token] += value
    token = drawn(
        logits,
        row(
            output_ids,
            prompt_ids,
            temperature=0.0,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias=bias,
        ),
    )
    assert float(expected[token]) == pytest.approx(float(expected.max()), abs=1e-5)


def test_endings_are_forbidden_until_min_tokens() -> None:
    logits = some_logits(1, 1)[0]
    logits[2], logits[9], logits[11] = 50.0, 49.0, 48.0
    early = row((4,), temperature=0.0, min_tokens=2, stop_token_ids=(9,))
    late = row((4, 4), temperature=0.0, min_tokens=2, stop_token_ids=(9,))
    assert drawn(logits, early) == 11
    assert drawn(logits, late) == 2


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = some_logits(2, 3)
    expected = logits.log_softmax(-1)
    rows = [
        row(seed=3, temperature=0.5, logprobs=3, logit_bias={7: 100.0}),
        row(temperature=0.0, logprobs=0),
    ]
    first, second = sample(logits, rows)
    assert first.token_id == 7
    assert first.logprob == pytest.approx(float(expected[0, 7]), abs=1e-5)
    assert [token for token, _ in first.top] == expected[0].topk(3).indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert second.logprob == pytest.approx(float(expected[1].max()), abs=1e-5)
    assert second.top == ()
    assert sample(logits, [row(temperature=0.0)] * 2)[0].logprob is None


@pytest.mark.parametrize("temperature", [1e-38, 1e-320, 1e-5])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_temperature_next_to_zero_draws_the_largest_logit(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[-80.0, 3.0, 4e4, 2.0]])
    assert drawn(logits[0], row(temperature=temperature, top_p=top_p, seed=5)) == 2
