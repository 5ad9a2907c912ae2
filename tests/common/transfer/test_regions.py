"""From runs to slices, without a process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.transfer import PeerInfo, RegionError, RegionInfo, RegionOverlap, Run
from common.transfer.regions import Region, check_new_region, plan_slices

KV_BYTES = 1 << 12
LOCAL_BASE, REMOTE_BASE = 1 << 20, 1 << 30
LOCAL = {"kv": Region("kv", LOCAL_BASE, KV_BYTES, None)}
PEER = PeerInfo(None, "ab" * 16, "host", 1, (RegionInfo("kv", REMOTE_BASE, KV_BYTES),))


@st.composite
def runs_in_range(draw: st.DrawFn) -> Run:
    nbytes = draw(st.integers(1, KV_BYTES // 4))
    offsets = st.integers(0, KV_BYTES - nbytes)
    return Run("kv", draw(offsets), "kv", draw(offsets), nbytes)


def byte_pairs(slices: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [
        (source + index, destination + index)
        for source, destination, nbytes in slices
        for index in range(nbytes)
    ]


@given(st.lists(runs_in_range(), max_size=12), st.integers(1, KV_BYTES))
def test_slices_move_the_same_bytes_as_the_runs_in_the_same_order(runs: list[Run], limit: int) -> None:
    slices, sources = plan_slices(runs, LOCAL, PEER, {"kv": REMOTE_BASE}, limit)
    plain = [(LOCAL_BASE + run.local_offset, REMOTE_BASE + run.remote_offset, run.nbytes) for run in runs]
    assert byte_pairs(slices) == byte_pairs(plain)
    assert all(0 < nbytes <= limit for _, _, nbytes in slices)
    assert sources == (tuple(LOCAL.values()) if runs else ())


@given(st.integers(1, 64))
def test_runs_adjacent_on_both_sides_become_one_slice(pages: int) -> None:
    runs = [Run("kv", page * 64, "kv", page * 64, 64) for page in range(pages)]
    slices, _ = plan_slices(runs, LOCAL, PEER, {"kv": REMOTE_BASE}, KV_BYTES)
    assert slices == [(LOCAL_BASE, REMOTE_BASE, pages * 64)]


def test_runs_adjacent_on_one_side_only_stay_apart() -> None:
    runs = [Run("kv", 0, "kv", 0, 64), Run("kv", 64, "kv", 128, 64)]
    slices, _ = plan_slices(runs, LOCAL, PEER, {"kv": REMOTE_BASE}, KV_BYTES)
    assert len(slices) == 2


@given(
    st.integers(-KV_BYTES, 2 * KV_BYTES), st.integers(-KV_BYTES, 2 * KV_BYTES), st.integers(-1, 2 * KV_BYTES)
)
def test_no_address_outside_a_region_is_ever_planned(
    local_offset: int, remote_offset: int, nbytes: int
) -> None:
    run = Run("kv", local_offset, "kv", remote_offset, nbytes)
    fits = nbytes > 0 and all(
        offset >= 0 and offset + nbytes <= KV_BYTES for offset in (local_offset, remote_offset)
    )
    if fits:
        plan_slices([run], LOCAL, PEER, {"kv": REMOTE_BASE}, KV_BYTES)
    else:
        with pytest.raises(RegionError, match="must"):
            plan_slices([run], LOCAL, PEER, {"kv": REMOTE_BASE}, KV_BYTES)


@pytest.mark.parametrize(
    ("base", "nbytes"), [(LOCAL_BASE, 1), (LOCAL_BASE - 1, 2), (LOCAL_BASE + KV_BYTES - 1, 2)]
)
def test_overlapping_memory_is_refused(base: int, nbytes: int) -> None:
    with pytest.raises(RegionOverlap, match="kv"):
        check_new_region(Region("more", base, nbytes, None), LOCAL)


def test_adjacent_memory_is_fine_and_a_name_is_taken_once() -> None:
    check_new_region(Region("more", LOCAL_BASE + KV_BYTES, 1, None), LOCAL)
    with pytest.raises(RegionOverlap, match="registered already"):
        check_new_region(Region("kv", 1 << 40, 1, None), LOCAL)


def test_memory_without_bytes_or_address_is_refused() -> None:
    with pytest.raises(RegionError, match="nbytes = 0"):
        check_new_region(Region("more", 1 << 40, 0, None), LOCAL)
    with pytest.raises(RegionError, match="address = 0"):
        check_new_region(Region("more", 0, 1, None), LOCAL)
