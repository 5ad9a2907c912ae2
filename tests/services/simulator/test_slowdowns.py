"""What requests are held against that would be alone."""

import pytest

from services.simulator.performance.linear import LinearPerformance
from services.simulator.slowdowns import prompt_alone_s, slowdowns_of
from tests.services.simulator.meshes import mesh, pool, run

STEEP = {"kind": "linear", "prefill_s": 0.5, "per_prompt_token_s": 1e-3, "per_context_token_s": 1e-2}
MODEL = LinearPerformance(prefill_s=0.5, per_prompt_token_s=1e-3, per_context_token_s=1e-2)


def test_a_request_alone_takes_just_what_it_takes_alone() -> None:
    """To the token of context: here one of five is a fifth of a step."""
    cluster = run(mesh(pool("mixed", performance=STEEP)), (0.0, 5, 3), (10.0, 40, 1), (20.0, 7, 2))
    found = slowdowns_of(cluster.records, MODEL, None)
    assert found.ttft == pytest.approx([1.0] * 3)
    assert found.end_to_end == pytest.approx([1.0] * 3)
    # Who has one token has no gap.
    assert found.tbt == pytest.approx([1.0] * 2)


def test_a_prompt_in_chunks_takes_a_pass_for_each() -> None:
    assert prompt_alone_s(MODEL, 300, 128) == pytest.approx(3 * 0.5 + 0.3)
    assert prompt_alone_s(MODEL, 300, None) == prompt_alone_s(MODEL, 300, 300) == pytest.approx(0.5 + 0.3)
    chunked = mesh(pool("mixed", performance=STEEP), instance={"chunk_tokens": 128})
    found = slowdowns_of(run(chunked, (0.0, 300, 4)).records, MODEL, 128)
    assert [*found.ttft, *found.tbt, *found.end_to_end] == pytest.approx([1.0] * 3)


def test_who_was_refused_is_not_compared() -> None:
    refused = mesh(pool("mixed", kv_tokens=160, performance=STEEP))
    cluster = run(refused, (0.0, 20, 3), (10.0, 4_000, 3))
    assert len(slowdowns_of(cluster.records, MODEL, None).ttft) == 1
