"""What recorded batches could reach that take turns at attention: who has to wait, in rotation or fixed.

From the median slice and the median layer's attention, by the paper's conditions
(``scheduler.policy.staggering``). What was reached is in the summary's shares.
"""

from collections.abc import Iterator
from statistics import median

from common.timeline import name_of
from common.timeline_events import LAYER, SLICE
from scheduler.policy.staggering import Staggering, staggering_timing
from services.trace_layout import Layout, Slice


def staggering_lines(layout: Layout) -> Iterator[str]:
    """One for every service whose batches took turns; none where no attention worker was recorded."""
    attention = [
        each
        for service in layout.services
        if service.service.kind == "attention"
        for track in service.tracks
        for each in track.slices
        if each.name == name_of(LAYER)
    ]
    for service in layout.services:
        by_track = [
            [each for each in track.slices if each.name == name_of(SLICE)] for track in service.tracks
        ]
        staggering = _staggering_of([slices for slices in by_track if slices])
        if staggering.batches == 1 or not attention:
            continue
        slice_s = _median_s([each for slices in by_track for each in slices])
        yield _line(service.service.service_id, staggering, slice_s, _median_s(attention))


def _staggering_of(by_replica: list[list[Slice]]) -> Staggering:
    """Of each replica's slices. As many replicas as batches: these were fixed."""
    batches = 1 + max((each.values.get("batch", 0) for slices in by_replica for each in slices), default=0)
    return Staggering(batches, is_fixed=batches > 1 and len(by_replica) == batches)


def _line(service_id: str, staggering: Staggering, slice_s: float, attention_s: float) -> str:
    timing = staggering_timing(staggering, slice_s, attention_s)
    replicas = f"{staggering.replicas} model replica{'s' * (staggering.replicas > 1)}"
    kind, who = ("fixed", "Attention never waits") if staggering.is_fixed else ("rotating", "Nobody waits")
    return (
        f"{service_id}: {staggering.batches} batches {kind} on {replicas}."
        f" A slice takes {1e3 * slice_s:.2f} ms, a layer's attention"
        f" {1e3 * attention_s:.2f} ms: replicas can be busy {timing.replica_share:.0%} of the time,"
        f" attention {timing.attention_share:.0%}. {who} where a slice takes {staggering.batches - 1}"
        " times the attention."
    )


def _median_s(slices: list[Slice]) -> float:
    return median(each.duration_ns for each in slices) / 1e9
