"""What recorded batches could reach that take turns at attention: who has to wait, in rotation or fixed.

From the median slice and a layer's attention in the median step, by the paper's conditions
(``scheduler.policy.staggering``). What was reached is in the summary's shares.
"""

from collections.abc import Iterator
from statistics import median

from common.timeline import name_of
from common.timeline_events import ATTENTION_STEP, SLICE
from scheduler.policy.staggering import Staggering, staggering_timing
from services.tracing.layout import Layout, Slice


def staggering_lines(layout: Layout) -> Iterator[str]:
    """One for every service whose batches took turns; none where no attention worker was recorded."""
    attention_s = layer_attention_s(layout)
    for service in layout.services:
        by_track = [
            [each for each in track.slices if each.name == name_of(SLICE)] for track in service.tracks
        ]
        staggering = _staggering_of([slices for slices in by_track if slices])
        if staggering.batches == 1 or attention_s is None:
            continue
        slice_s = median(each.duration_ns for slices in by_track for each in slices) / 1e9
        yield _line(service.service.service_id, staggering, slice_s, attention_s)


def layer_attention_s(layout: Layout) -> float | None:
    """Of one layer and batch on a worker, over cached tokens and new ones; None where none was recorded."""
    per_layer_ns = [
        each.values["attention ns"] / each.values["layers"]
        for service in layout.services
        if service.service.kind == "attention"
        for track in service.tracks
        for each in track.slices
        if each.name == name_of(ATTENTION_STEP)
    ]
    return median(per_layer_ns) / 1e9 if per_layer_ns else None


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
