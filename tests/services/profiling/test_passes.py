"""Which passes a profile measures, and what they consist of."""

import pytest

from services.profiling.passes import (
    BEFORES,
    CHUNKS,
    larger_chunks,
    larger_steps,
    spread,
)


def test_what_follows_the_largest_ends_somewhere() -> None:
    waiting, seen = [(BEFORES[-1], CHUNKS[-1])], set[tuple[int, int]]()
    while waiting:
        case = waiting.pop()
        seen.add(case)
        waiting += [larger for larger in larger_chunks(case) if larger not in seen]
    assert {before for before, _ in seen} == {1024, 4096, 16384}
    assert {tokens for _, tokens in seen} == {1024, 2048, 4096, 8192}
    assert [*larger_chunks((0, 45))] == [*larger_chunks((256, 512))] == [*larger_steps((64, 512))] == []
    assert [*larger_chunks((1024, 45))] == [(4096, 45)]
    assert {*larger_steps((128, 1024))} == {(256, 1024), (128, 2048)}
    assert [*larger_steps((512, 16384))] == []


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 32])
def test_a_batch_s_contexts_differ_about_their_mean(batch: int) -> None:
    contexts = spread(batch, 128)
    assert len(contexts) == batch
    assert sum(contexts) == 128 * batch
    assert contexts == sorted(contexts)
    assert min(contexts) >= 1
    assert max(contexts) > 1.5 * 128 or batch == 1
