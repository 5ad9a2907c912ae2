"""What a simulated mesh did when, recorded as a live one's services record it (``common.timeline``).

Passes of each instance, its transfers of KV, and marks of each request's life, in virtual nanoseconds. Steps
that follow on one another are one record, as they are one event.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

from common.ids import InstanceId
from common.messages import PullKV
from common.timeline import RECORD, EventId, Recording, ThreadRecords, define, defined_events
from common.timeline_events import (
    FAILED,
    FINISHED,
    FIRST_TOKEN,
    PLACED,
    PREFILL_STEP,
    PULL_KV,
    RECEIVED,
    REFUSED,
    SECOND_TOKEN,
    TRANSFER_KV,
)
from services.simulator.engine import EnginePass
from services.simulator.history import Kind, MeshChange
from services.simulator.records import OUTCOMES, Outcome, Records, request_id_of

DECODE_STEPS = define("decode steps", "step", "sequences", "context tokens", "steps")
LANE = "/"
"""Between an instance's name and its lane's number."""
CHANGES: dict[Kind, EventId] = {kind: define(kind, "mark") for kind in get_args(Kind)}
ENDS: dict[Outcome, EventId] = {"done": FINISHED, "failed": FAILED, "rejected": REFUSED}
MIXED_STEP = define("mixed step", "step", "prompts", "tokens", "sequences", "context tokens")


@dataclass(slots=True)
class _Written:
    """One service's records, and the texts that they name by their places."""

    records: bytearray = field(default_factory=bytearray)
    texts: dict[str, int] = field(default_factory=lambda: {"": 0})

    def place_of(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))


@dataclass(slots=True)
class SimulatedTimeline:
    """``ended_ns``: of what ended last."""

    ended_ns: int = 0
    _services: dict[str, _Written] = field(default_factory=dict)

    def add(
        self,
        service: str,
        event: EventId,
        began_s: float,
        ended_s: float,
        *values: int,
        requests: str = "",
        peer: str = "",
    ) -> None:
        """``requests``: ids with spaces between."""
        written = self._services.setdefault(service, _Written())
        begin_ns, end_ns = round(began_s * 1e9), round(ended_s * 1e9)
        four = (*values, 0, 0, 0, 0)[:4]
        places = written.place_of(requests), written.place_of(peer)
        written.records += RECORD.pack(begin_ns, end_ns, event, *places, *four)
        self.ended_ns = max(self.ended_ns, end_ns)

    def add_pass(self, instance_id: InstanceId, done: EnginePass) -> None:
        times = (done.began_s, done.ended_s)
        service = str(instance_id)
        if done.is_lane:
            service = f"{instance_id}{LANE}{done.track}"
        elif done.track:
            service = f"{instance_id}, pass {done.track + 1}"
        if done.chunk is None:
            rows = (done.sequences, done.context_tokens, done.steps)
            self.add(service, DECODE_STEPS, *times, *rows)
            return
        slices = done.chunk.slices
        requests = " ".join(dict.fromkeys(piece.request.request_id for piece in slices))
        chunk = (len(slices), sum(piece.tokens for piece in slices))
        if done.sequences:
            rows_beside = (done.sequences, done.context_tokens)
            self.add(service, MIXED_STEP, *times, *chunk, *rows_beside, requests=requests)
        else:
            self.add(service, PREFILL_STEP, *times, *chunk, requests=requests)

    def add_transfer(
        self, sender: InstanceId, pull: PullKV, nbytes: int, layers: range, began_s: float, ended_s: float
    ) -> None:
        """``layers``: from the first to the last of which there was KV in it."""
        values = (pull.attempt, nbytes, layers.start, layers.stop - 1)
        names = {"requests": pull.request_id, "peer": pull.decode_instance}
        self.add(sender, TRANSFER_KV, began_s, ended_s, *values, **names)

    def add_pull(self, pull: PullKV, sender: InstanceId, nbytes: int, began_s: float, ended_s: float) -> None:
        values = (pull.attempt, pull.portion, nbytes)
        names = {"requests": pull.request_id, "peer": sender}
        self.add(pull.decode_instance, PULL_KV, began_s, ended_s, *values, **names)

    def add_placed(self, gateway: str, request_id: str, now: float) -> None:
        self.add(gateway, PLACED, now, now, requests=request_id)

    def add_changes(self, changes: Iterable[MeshChange]) -> None:
        """Marks of those to whom they happened."""
        for each in changes:
            self.add(each.instance, CHANGES[each.kind], each.at_s, each.at_s, peer=each.detail)

    def add_lives(self, gateway: str, records: Records) -> None:
        """Of a run that is over."""
        marks = (
            (RECEIVED, records.arrival_s),
            (FIRST_TOKEN, records.first_token_s),
            (SECOND_TOKEN, records.second_token_s),
        )
        for number in range(len(records)):
            outcome = OUTCOMES[records.outcome[number]]
            end = () if outcome == "open" else ((ENDS[outcome], records.end_s),)
            for event, column in (*marks, *end):
                if not math.isnan(column[number]):
                    self.add(gateway, event, column[number], column[number], requests=request_id_of(number))

    def recordings(self) -> dict[str, Recording]:
        """Each service's, in the order of their first records."""
        return {
            service: Recording(
                began_ns=0,
                ended_ns=self.ended_ns,
                events=defined_events(),
                threads=(ThreadRecords("engine", 0, 0, tuple(written.texts), bytes(written.records)),),
            )
            for service, written in self._services.items()
        }
