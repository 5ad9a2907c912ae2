"""Shared buffers between two processes."""

import mmap
import os

import msgspec
import pytest

from common.transfer import PeerUnreachable, RegionError, RegionInfo, SharedBuffer, StalePeer
from common.transfer.buffers import map_region
from tests.common.transfer.peer_process import PeerProcess

NBYTES = 1 << 16


def announced(buffer: SharedBuffer) -> RegionInfo:
    return RegionInfo("kv", buffer.address, buffer.nbytes, buffer.handle)


def test_what_is_written_into_the_mapping_is_in_the_buffer() -> None:
    buffer = SharedBuffer(NBYTES)
    mapped = map_region(os.getpid(), announced(buffer))
    assert mapped.address != buffer.address
    mapped.mapping[100:104] = b"page"
    assert bytes(buffer.memory[100:104]) == b"page"
    buffer.close()


def test_the_size_is_sealed() -> None:
    buffer = SharedBuffer(NBYTES)
    fd = os.open(f"/proc/self/fd/{buffer.handle.fd}", os.O_RDWR)
    for size in (0, 2 * NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    buffer.close()


def test_a_view_keeps_the_memory_after_close_but_nobody_can_map_it_any_more() -> None:
    buffer = SharedBuffer(NBYTES)
    view, region = buffer.memory, announced(buffer)
    buffer.close()
    buffer.close()
    view[0] = 7
    assert view[0] == 7
    with pytest.raises(RegionError, match="closed"):
        _ = buffer.handle
    with pytest.raises((PeerUnreachable, StalePeer)):
        map_region(os.getpid(), region)


def test_another_file_behind_the_descriptor_is_stale() -> None:
    buffer = SharedBuffer(NBYTES)
    region = announced(buffer)
    buffer.close()
    successor = SharedBuffer(NBYTES)
    assert successor.handle.fd == region.shared.fd if region.shared else False
    with pytest.raises(StalePeer):
        map_region(os.getpid(), region)
    successor.close()


def test_memory_that_is_not_shared_cannot_be_mapped() -> None:
    with pytest.raises(PeerUnreachable, match="not shared"):
        map_region(os.getpid(), RegionInfo("kv", 4096, NBYTES, None))


def test_a_buffer_needs_bytes() -> None:
    with pytest.raises(RegionError, match="nbytes = 0"):
        SharedBuffer(0)


def test_a_killed_peer_leaves_its_memory_to_whoever_mapped_it_and_nothing_else_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    with PeerProcess("shared_memory", NBYTES) as peer:
        mapped = map_region(peer.info.pid, peer.info.region("kv"))
        peer.kill()
        mapped.mapping[:] = b"\1" * NBYTES
        assert mapped.mapping[NBYTES - 1] == 1
        with pytest.raises(PeerUnreachable):
            map_region(peer.info.pid, peer.info.region("kv"))
    assert set(os.listdir("/dev/shm")) <= before


def test_a_region_announced_larger_than_it_is_is_stale() -> None:
    buffer = SharedBuffer(NBYTES)
    larger = msgspec.structs.replace(announced(buffer), nbytes=NBYTES + mmap.PAGESIZE)
    with pytest.raises(StalePeer):
        map_region(os.getpid(), larger)
    buffer.close()
