"""Registered memory of this process, and the checks that keep every write inside it and inside the peer's.

Mooncake validates nothing at registration, and a range that the receiver rejects costs everybody on that link
up to a second. So every address that reaches an engine is computed here, from names and offsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.transfer.interface import PeerInfo, RegionError, RegionOverlap, Run

Slice = tuple[int, int, int]
"""(source address, destination address, nbytes): the unit an engine is given."""


@dataclass(frozen=True, slots=True)
class Region:
    """``[base, base + nbytes)`` of this process; ``owner`` keeps it allocated, ``is_host`` is not a GPU's."""

    name: str
    base: int
    nbytes: int
    owner: object
    is_host: bool = True

    @property
    def end(self) -> int:
        return self.base + self.nbytes


def check_new_region(region: Region, known: Mapping[str, Region]) -> None:
    """Raises RegionError for an unusable region, RegionOverlap for one that touches a known one."""
    if region.nbytes <= 0:
        raise RegionError(f"region {region.name!r}: nbytes = {region.nbytes}, must be over 0")
    if region.base <= 0:
        raise RegionError(f"region {region.name!r}: address = {region.base}, must be over 0")
    if region.name in known:
        raise RegionOverlap(f"region {region.name!r} is registered already")
    for other in known.values():
        if region.base < other.end and other.base < region.end:
            raise RegionOverlap(
                f"region {region.name!r} [{region.base:#x}, {region.end:#x}) overlaps "
                f"{other.name!r} [{other.base:#x}, {other.end:#x})"
            )


def plan_slices(
    runs: Sequence[Run],
    local: Mapping[str, Region],
    peer: PeerInfo,
    remote_base: Mapping[str, int],
    max_slice_bytes: int,
) -> tuple[list[Slice], tuple[Region, ...]]:
    """Runs as addresses, joined where adjacent on both sides, then split at ``max_slice_bytes``.

    ``remote_base`` is where each of the peer's regions begins in the address space that the slices are for:
    the peer's own, or ours where it is mapped. Returns the slices and the local regions they read. Raises
    RegionError, naming the run, before anything is sent.
    """
    remote = {region.name: region for region in peer.regions}
    sources: dict[str, Region] = {}
    slices: list[Slice] = []
    source = destination = length = 0
    for run in runs:
        local_region = local.get(run.local_region)
        remote_region = remote.get(run.remote_region)
        if local_region is None or remote_region is None:
            raise _unknown_region(run, local, peer)
        _check_range(run, run.local_offset, local_region.nbytes, "local")
        _check_range(run, run.remote_offset, remote_region.nbytes, "remote")
        sources[run.local_region] = local_region
        run_source = local_region.base + run.local_offset
        run_destination = remote_base[run.remote_region] + run.remote_offset
        if run_source == source + length and run_destination == destination + length:
            length += run.nbytes
            continue
        _append_split(slices, source, destination, length, max_slice_bytes)
        source, destination, length = run_source, run_destination, run.nbytes
    _append_split(slices, source, destination, length, max_slice_bytes)
    return slices, tuple(sources.values())


def _append_split(slices: list[Slice], source: int, destination: int, nbytes: int, limit: int) -> None:
    while nbytes > limit:
        slices.append((source, destination, limit))
        source, destination, nbytes = source + limit, destination + limit, nbytes - limit
    if nbytes:
        slices.append((source, destination, nbytes))


def _check_range(run: Run, offset: int, region_nbytes: int, side: str) -> None:
    if run.nbytes <= 0:
        raise RegionError(f"{run}: nbytes must be over 0")
    if offset < 0 or offset + run.nbytes > region_nbytes:
        raise RegionError(f"{run}: {side}_offset + nbytes must lie within 0..{region_nbytes}")


def _unknown_region(run: Run, local: Mapping[str, Region], peer: PeerInfo) -> RegionError:
    if run.local_region not in local:
        return RegionError(f"{run}: no local region {run.local_region!r}, only {', '.join(local)}")
    names = ", ".join(region.name for region in peer.regions)
    return RegionError(
        f"{run}: peer {peer.incarnation[:8]} has no region {run.remote_region!r}, only {names}"
    )
