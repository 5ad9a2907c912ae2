"""Which slices of a trace belong to one request, in which order: its walk, and its KV's way.

An arrow's stops lie inside slices, since that is what a viewer ties them to.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from common.timeline import name_of
from common.timeline_events import PULL_KV, TAKE_TOKENS, TRANSFER_KV
from services.tracing.layout import Layout, Slice


@dataclass(frozen=True, slots=True, order=True)
class Stop:
    """``track`` counts the service's tracks, as ``service`` counts the services."""

    time_ns: int
    service: int
    track: int


@dataclass(frozen=True, slots=True)
class Arrow:
    """At least two stops, in time's order. ``name`` is ``request`` or ``KV``."""

    name: str
    request: str
    stops: tuple[Stop, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    slice: Slice
    service: int
    track: int

    @property
    def stop(self) -> Stop:
        """Where the slice begins; KV that is pulled is there at the end."""
        time_ns = self.slice.end_ns - 1 if self.slice.name == name_of(PULL_KV) else self.slice.begin_ns
        return Stop(time_ns, self.service, self.track)


def find_arrows(layout: Layout) -> list[Arrow]:
    """One for each request that was seen at two places, one for each of its transfers that was."""
    arrows = []
    for request, places in _places_of_requests(layout).items():
        stops = tuple(sorted(_walk(places)))
        if len(stops) > 1:
            arrows.append(Arrow("request", request, stops))
        arrows.extend(Arrow("KV", request, stops) for stops in _transfers(places))
    return arrows


def _places_of_requests(layout: Layout) -> dict[str, list[_Place]]:
    found: dict[str, list[_Place]] = {}
    for service_index, service in enumerate(layout.services):
        for track_index, track in enumerate(service.tracks):
            for each in track.slices:
                for request in each.requests:
                    found.setdefault(request, []).append(_Place(each, service_index, track_index))
    return found


def _walk(places: list[_Place]) -> set[Stop]:
    """The first of every kind of work in every service, and the last tokens' arrival."""
    first: dict[tuple[int, str], Stop] = {}
    last: dict[int, Stop] = {}
    for place in places:
        key = (place.service, place.slice.name)
        first[key] = min(place.stop, first.get(key, place.stop))
        if place.slice.name == name_of(TAKE_TOKENS):
            last[place.service] = max(place.stop, last.get(place.service, place.stop))
    return {*first.values(), *last.values()}


def _transfers(places: list[_Place]) -> Iterator[tuple[Stop, Stop]]:
    """From every transfer to the pull of the same attempt that it answers."""
    pulls = [place for place in places if place.slice.name == name_of(PULL_KV)]
    for place in places:
        sent = place.slice
        if sent.name != name_of(TRANSFER_KV):
            continue
        for pull in pulls:
            is_same_attempt = pull.slice.values["attempt"] == sent.values["attempt"]
            if is_same_attempt and pull.slice.begin_ns <= sent.begin_ns < pull.slice.end_ns:
                arrived_ns = min(sent.end_ns, pull.slice.end_ns - 1)
                yield place.stop, Stop(arrived_ns, pull.service, pull.track)
