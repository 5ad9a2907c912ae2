from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv.layout import KVLayout

LAYOUTS = st.builds(
    KVLayout,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    block_size=st.integers(1, 5),
    element_bytes=st.sampled_from((1, 2, 4)),
)


def test_sizes_of_the_default_model() -> None:
    layout = KVLayout(layers=30, kv_heads=3, head_dim=64, block_size=256, element_bytes=2)
    assert layout.token_bytes == 30 * 2 * 3 * 64 * 2
    assert layout.token_layer_bytes == 2 * 3 * 64 * 2
    assert layout.block_bytes == 256 * layout.token_bytes
    assert layout.pool_bytes(7) == 7 * layout.block_bytes == 30 * layout.layer_bytes(7)


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size = 0"):
        KVLayout(layers=1, kv_heads=1, head_dim=1, block_size=0, element_bytes=1)


def test_whole_adjacent_blocks_are_one_run_a_plane() -> None:
    layout = KVLayout(layers=2, kv_heads=3, head_dim=4, block_size=8, element_bytes=2)
    runs = layout.runs([2, 3], 16, range(2), total_blocks=10)
    assert len(runs) == 4
    assert runs[0] == (2 * layout.page_bytes, 2 * layout.page_bytes)


def test_a_partial_block_is_one_run_a_head() -> None:
    layout = KVLayout(layers=1, kv_heads=3, head_dim=4, block_size=8, element_bytes=2)
    runs = layout.runs([5], 3, range(1), total_blocks=6)
    assert [length for _, length in runs] == [3 * 4 * 2] * 6


@st.composite
def handovers(draw: st.DrawFn) -> tuple[KVLayout, list[int], list[int], range, int, int, range]:
    layout = draw(LAYOUTS)
    count = draw(st.integers(0, 4))
    source_total = draw(st.integers(max(count, 1), 6))
    destination_total = draw(st.integers(max(count, 1), 6))
    source = draw(st.permutations(range(source_total)))[:count]
    destination = draw(st.permutations(range(destination_total)))[:count]
    stop = draw(st.integers(0, count * layout.block_size))
    positions = range(draw(st.integers(0, stop)), stop)
    first = draw(st.integers(0, layout.layers - 1))
    layers = range(first, draw(st.integers(first, layout.layers)))
    return layout, source, destination, positions, source_total, destination_total, layers


def offset_of(layout: KVLayout, total: int, layer: int, half: int, block: int, head: int, slot: int) -> int:
    """The definition of the pool's shape, written out."""
    index = layer
    for size, position in (
        (2, half),
        (total, block),
        (layout.kv_heads, head),
        (layout.block_size, slot),
        (layout.head_dim, 0),
    ):
        index = index * size + position
    return index * layout.element_bytes


@given(handovers())
def test_paired_runs_carry_exactly_the_sequence(
    handover: tuple[KVLayout, list[int], list[int], range, int, int, range],
) -> None:
    layout, source, destination, positions, source_total, destination_total, layers = handover
    expected = {
        (
            offset_of(layout, source_total, layer, half, source[t // layout.block_size], head, slot) + byte,
            offset_of(layout, destination_total, layer, half, destination[t // layout.block_size], head, slot)
            + byte,
        )
        for layer in layers
        for half in (0, 1)
        for head in range(layout.kv_heads)
        for t in positions
        for slot in (t % layout.block_size,)
        for byte in range(layout.head_dim * layout.element_bytes)
    }
    pairs = layout.paired_runs(source, destination, positions, source_total, destination_total, layers)
    carried = [(s + byte, d + byte) for s, d, length in pairs for byte in range(length)]
    assert len(carried) == len(expected)
    assert set(carried) == expected


@given(handovers())
def test_no_two_runs_continue_each_other(
    handover: tuple[KVLayout, list[int], list[int], range, int, int, range],
) -> None:
    layout, source, destination, positions, source_total, destination_total, layers = handover
    pairs = layout.paired_runs(source, destination, positions, source_total, destination_total, layers)
    for (s1, d1, length), (s2, d2, _) in pairwise(pairs):
        assert (s1 + length, d1 + length) != (s2, d2)


def test_a_table_too_short_for_its_tokens_is_refused() -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=1, block_size=4, element_bytes=1)
    with pytest.raises(ValueError, match=r"range\(0, 5\): destination_blocks"):
        layout.paired_runs([0, 1], [0], range(5), 2, 2, range(1))
    with pytest.raises(ValueError, match="block ids must lie in"):
        layout.paired_runs([0], [2], range(4), 2, 2, range(1))
    with pytest.raises(ValueError, match="layer_range"):
        layout.paired_runs([0], [0], range(4), 2, 2, range(2))


@given(st.data())
def test_a_worker_that_holds_some_heads_gets_their_bytes_and_no_others(data: st.DataObject) -> None:
    """Against the plain meaning: every byte of those heads' tokens, at its place in the smaller pool."""
    layout = KVLayout(layers=2, kv_heads=4, head_dim=2, block_size=3, element_bytes=1)
    tokens = data.draw(st.integers(1, 9))
    begin = data.draw(st.integers(0, tokens))
    first = data.draw(st.integers(0, 3))
    heads = range(first, data.draw(st.integers(first + 1, 4)))
    needed = -(-tokens // layout.block_size)
    source = data.draw(st.permutations(range(5)))[:needed]
    target = data.draw(st.permutations(range(6)))[:needed]
    held = layout.of_heads(heads)
    copied = {
        to + byte: of + byte
        for of, to, length in layout.paired_runs(source, target, range(begin, tokens), 5, 6, range(2), heads)
        for byte in range(length)
    }
    expected = {}
    for plane in range(2 * layout.layers):
        for token in range(begin, tokens):
            for index, head in enumerate(heads):
                block, offset = divmod(token, layout.block_size)
                for byte in range(layout.head_dim):
                    here = ((plane * 5 + source[block]) * 4 + head) * 3 + offset
                    there = ((plane * 6 + target[block]) * held.kv_heads + index) * 3 + offset
                    expected[there * 2 + byte] = here * 2 + byte
    assert copied == expected
