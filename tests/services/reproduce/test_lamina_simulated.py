"""Lamina's and vLLM's deployments under more than they can serve: memory is full, and what is counted."""

import pytest

from common.shapes import LLAMA_33B
from services.bench.lengths import LengthPair
from services.reproduce.lamina_decoding import NINE_TENTHS, held_context, lamina, vllm
from services.reproduce.lamina_simulated import (
    NIC_BYTES_S,
    Saturation,
    drawn_between,
    saturate_lamina,
    saturate_vllm,
    tree_of,
    with_kv_at_once,
)
from services.simulator.config import simulated_from_tree
from services.simulator.records import Records

STEP_S = 0.05
PAIRS = tuple(LengthPair(1000 + 37 * number % 400, 80 + 13 * number % 60) for number in range(200))


def drawn(begun_s: float, tokens: int) -> tuple[float, float, int]:
    """When its second token came, and its last, and how many it has."""
    return begun_s + STEP_S, begun_s + (tokens - 1) * STEP_S, tokens


def records_of(*requests: tuple[float, float, int]) -> Records:
    records = Records()
    for second_s, end_s, tokens in requests:
        number = records.begin(0.0, 100, tokens)
        records.first_token_s[number] = 0.0
        records.second_token_s[number] = second_s
        records.drawn_tokens[number] = tokens
        records.end(number, "done", end_s)
    return records


def test_a_sequence_counts_while_it_is_in_steps() -> None:
    records = records_of(drawn(0.0, 101), drawn(0.0, 401), drawn(2.5, 51), drawn(30.0, 11))
    found = drawn_between(records, 0.0, 10.0)
    assert found.batch == pytest.approx((5.0 + 10.0 + 2.5) / 10.0)
    assert found.tokens_s == pytest.approx((100 + 200 + 50) / 10.0)
    assert found.step_s == pytest.approx(STEP_S)


def test_an_answer_of_two_tokens_takes_a_step_as_others_do() -> None:
    records = records_of(drawn(0.0, 201), *(drawn(0.1 * number, 2) for number in range(50)))
    found = drawn_between(records, 0.0, 5.0)
    assert found.tokens_s == pytest.approx((100 + 50) / 5.0)
    assert found.step_s == pytest.approx(STEP_S)


def test_nobody_with_three_tokens_says_nothing() -> None:
    with pytest.raises(ValueError, match="three tokens"):
        drawn_between(records_of(drawn(0.0, 2)), 0.0, 1.0)


def test_memory_is_full_and_steps_take_what_the_formulas_say() -> None:
    context = held_context(PAIRS)
    base, ours = vllm(LLAMA_33B, context, 2, NINE_TENTHS), lamina(LLAMA_33B, context, (1, 2), NINE_TENTHS)
    assert base is not None
    assert ours is not None
    found = saturate_vllm(LLAMA_33B, 2, Saturation(PAIRS, base, 0.5))
    assert found.batch == pytest.approx(base.batch, rel=0.08)
    # Two devices' reductions: 120 of 10 microseconds, and their bytes.
    assert base.step_s < found.step_s < 1.12 * base.step_s
    found = saturate_lamina(LLAMA_33B, (1, 2), Saturation(PAIRS, ours, 0.5))
    assert found.batch == pytest.approx(ours.batch, rel=0.1)
    assert found.step_s == pytest.approx(ours.step_s, rel=0.05)


def test_what_steps_exchange_keeps_its_links_and_prompts_kv_has_others() -> None:
    base = lamina(LLAMA_33B, held_context(PAIRS), (1, 2), NINE_TENTHS)
    assert base is not None
    decode = {
        "name": "decode",
        "device": "h100",
        "link_bytes_per_s": NIC_BYTES_S,
        "instance": {"attention_workers": 2},
    }
    workers = {"name": "attention", "role": "attention", "count": 2, "device": "h20"}
    workers |= {"link_bytes_per_s": NIC_BYTES_S, "performance": {"kind": "roofline"}}
    tree = tree_of(LLAMA_33B, Saturation(PAIRS, base), (decode, workers))
    simulated = with_kv_at_once(simulated_from_tree(tree))
    assert simulated.attention is not None
    assert simulated.attention.link_bytes_per_s == simulated.cluster.link_bytes_per_s
    (remote,) = (each.remote for each in simulated.pools if each.remote is not None)
    assert remote.cost.wire.worker_bytes_per_s == NIC_BYTES_S
    assert all(each.config.link_bytes_per_s is None for each in simulated.pools)
