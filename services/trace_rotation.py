"""What a recorded rotation could reach: of batches that take turns on model replicas, who has to wait.

From the median slice and the median layer's attention, by the paper's conditions
(``scheduler.policy.rotation``). What was reached is in the summary's shares.
"""

from collections.abc import Iterator
from statistics import median

from common.timeline import name_of
from common.timeline_events import LAYER, SLICE
from scheduler.policy.rotation import Rotation, rotation_timing
from services.trace_layout import Layout, Slice


def rotation_lines(layout: Layout) -> Iterator[str]:
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
        slices = [each for track in service.tracks for each in track.slices if each.name == name_of(SLICE)]
        rotation = Rotation(1 + max((each.values.get("batch", 0) for each in slices), default=0))
        if rotation.batches == 1 or not attention:
            continue
        slice_s, attention_s = _median_s(slices), _median_s(attention)
        timing = rotation_timing(rotation, slice_s, attention_s)
        replicas = f"{rotation.replicas} model replica{'s' * (rotation.replicas > 1)}"
        yield (
            f"{service.service.service_id}: {rotation.batches} batches on {replicas}."
            f" A slice takes {1e3 * slice_s:.2f} ms, a layer's attention"
            f" {1e3 * attention_s:.2f} ms: replicas can be busy {timing.replica_share:.0%} of the time,"
            f" attention {timing.attention_share:.0%}. Nobody waits where a slice takes {rotation.replicas}"
            " times the attention."
        )


def _median_s(slices: list[Slice]) -> float:
    return median(each.duration_ns for each in slices) / 1e9
