"""All schedulers of a simulated mesh: each call is taken by one of them, as by a queue group's members, and
each hears every report and end."""

from dataclasses import dataclass, field

import numpy as np

from common.ids import InstanceId
from common.messages import (
    GenerationRequest,
    InstanceLife,
    KVLinkFailed,
    KVLinkWorks,
    LoadReport,
    PlaceMoved,
    RequestEnded,
)
from services.simulator.scheduler import Answer, Listener, Predict, SimulatedScheduler


@dataclass(slots=True)
class Schedulers:
    """``members``: one at least; the first leads, for ever. ``chance`` draws whose call it is."""

    members: tuple[SimulatedScheduler, ...]
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        for each in self.members:
            each.peers = tuple(other for other in self.members if other is not each)

    @property
    def leader(self) -> SimulatedScheduler:
        return self.members[0]

    @property
    def most_booked(self) -> int:
        """Requests that one of them takes for placed."""
        return max(len(each.state.requests) for each in self.members)

    @property
    def asked_to_leave(self) -> int:
        return sum(each.asked_to_leave for each in self.members)

    def start(self) -> None:
        for each in self.members:
            each.start()

    def predict_by(self, predict: Predict, predictor_s: float) -> None:
        for each in self.members:
            each.predict, each.predictor_s = predict, predictor_s

    def listen(self, listener: Listener) -> None:
        """To what the leader hears: what it is asked itself, what others book, and each end."""
        self.leader.listener = listener

    def open_mail(self) -> None:
        for each in self.members:
            each.open_mail()

    def submit(self, request: GenerationRequest, lost: tuple[InstanceId, ...], answer: Answer) -> None:
        self._any().submit(request, lost, answer)

    def place_moved(self, call: PlaceMoved, answer: Answer) -> None:
        self._any().place_moved(call, answer)

    def tell_report(self, report: LoadReport) -> None:
        for each in self.members:
            each.tell_report(report)

    def tell_end(self, ended: RequestEnded) -> None:
        for each in self.members:
            each.tell_end(ended)

    def tell_ended(self, life: InstanceLife) -> None:
        for each in self.members:
            each.tell_ended(life)

    def tell_link(self, word: KVLinkFailed | KVLinkWorks) -> None:
        for each in self.members:
            each.tell_link(word)

    def _any(self) -> SimulatedScheduler:
        if len(self.members) == 1:
            return self.members[0]
        return self.members[int(self.chance.integers(len(self.members)))]
