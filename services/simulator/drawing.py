"""Which sequences an instance's decode room draws for, and what their clients see of its steps: no token is
looked at by itself, and what a step costs here does not depend on how many sequences it has."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.ids import RequestId
from common.kv.blocks import BlockOwner
from common.messages import TokenEvent
from decode.events import StepRow
from decode.sequence import DecodeSequence
from decode.speed import smoothed_step_s
from decode.state import DecodeState
from services.simulator.gaps import GapCounts, SlowestSteps
from services.simulator.gateway import SimulatedGateway


@dataclass(slots=True)
class _Decoded:
    """A sequence that is in the batch: its first token in the lane was that of this one's ``first_step``.
    ``slowest_s``: of its steps in other lanes; where sequences take turns, of all its tokens, the newest of
    which came at ``token_s``."""

    sequence: DecodeSequence
    lane: int
    first_step: int
    slowest_s: float = 0.0
    token_s: float | None = None


@dataclass(slots=True)
class _Lane:
    """``joining``: those that take part in its newest step for the first time, whose ``rows`` these are."""

    slowest: SlowestSteps = field(default_factory=SlowestSteps)
    joining: list[_Decoded] = field(default_factory=list)
    last_step_s: float = 0.0
    rows: Sequence[StepRow] = ()


@dataclass(slots=True)
class Drawing:
    """``fresh``: whom no step has taken yet. ``steps``, and ``rows`` of all of them, since the start;
    ``step_s``: what one took of late, or the steps until a sequence's next turn. ``gaps``: between tokens,
    but for the first ones of this room, of which the gateway knows. A step that a sequence sits out, as there
    is no block for it, makes two gaps of one; and one between two lanes' steps counts as one of the latter
    lane's. Where sequences take turns (``decode.context_turns``) each one's tokens are looked at instead, and
    no gap is counted as two."""

    decode: DecodeState
    gateway: SimulatedGateway
    gaps: GapCounts = field(default_factory=GapCounts)
    steps: int = 0
    step_s: float | None = None
    rows: int = 0
    fresh: list[BlockOwner] = field(default_factory=list)
    _decoded: dict[RequestId, _Decoded] = field(default_factory=dict)
    _lanes: list[_Lane] = field(init=False)

    def __post_init__(self) -> None:
        self._lanes = [_Lane() for _ in range(self.decode.lanes)]

    def begin_step(self, rows: Sequence[StepRow], lane: int = 0) -> None:
        """Those of the fresh ones that this step takes join."""
        if len(self._lanes) > 1:
            self._change_lanes(rows, lane)
        self._lanes[lane].rows = rows
        if not self.fresh:
            return
        taking = self._lanes[lane]
        waiting = []
        for owner in self.fresh:
            sequence = self.decode.sequences.get(owner)
            if sequence is None:
                continue
            if sequence.lane == lane and self.decode.batches.computes(owner):
                decoded = self._decoded[owner.request_id] = _Decoded(sequence, lane, taking.slowest.steps)
                taking.joining.append(decoded)
            else:
                waiting.append(owner)
        self.fresh = waiting

    def end_steps(
        self,
        rows: int,
        steps: int,
        first_end_s: float,
        ended_s: float,
        last_s: float,
        lane: int = 0,
        slowest_s: float | None = None,
    ) -> None:
        """Of so many rows: the first of them ended then, and the last then, after ``last_s``. ``slowest_s``:
        the most from one's end to the next one's, where that is not ``last_s``."""
        taking = self._lanes[lane]
        slowest = taking.slowest
        per_token = self.decode.turns.steps_per_token(lane)
        self.step_s = smoothed_step_s(self.step_s, last_s * per_token, steps)
        self.steps += steps
        self.rows += steps * rows
        if self.decode.turns.most_tokens is not None:
            self._end_turns(taking, steps, first_end_s, ended_s, last_s if slowest_s is None else slowest_s)
            return
        staying = rows - len(taking.joining)
        if staying:
            gap_s = first_end_s - taking.last_step_s
            self.gaps.add(gap_s, staying)
            slowest.add(1, gap_s)
        if taking.joining:
            self._tell_joined(taking, first_end_s)
        if steps > 1:
            self.gaps.add((ended_s - first_end_s) / (steps - 1), rows * (steps - 1))
            slowest.add(steps - 1, last_s if slowest_s is None else slowest_s)
        taking.last_step_s = ended_s

    def _end_turns(
        self, taking: _Lane, steps: int, first_end_s: float, ended_s: float, slowest_s: float
    ) -> None:
        for row in taking.rows:
            decoded = self._decoded.get(row.owner.request_id)
            if decoded is None or decoded.sequence.owner != row.owner:
                continue
            if decoded.token_s is None:
                request, drawn = decoded.sequence.request, len(decoded.sequence.output_ids)
                self.gateway.take_second(request.request_id, request.attempt, drawn + 1, first_end_s)
            else:
                gap_s = first_end_s - decoded.token_s
                self.gaps.add(gap_s)
                decoded.slowest_s = max(decoded.slowest_s, gap_s)
            if steps > 1:
                self.gaps.add((ended_s - first_end_s) / (steps - 1), steps - 1)
                decoded.slowest_s = max(decoded.slowest_s, slowest_s)
            decoded.token_s = ended_s
        taking.joining = []

    def end_sequence(self, last: TokenEvent) -> None:
        decoded = self._decoded.pop(last.request_id)
        self.gateway.take_last(last, self._slowest_of(decoded))

    def leave(self, request_id: RequestId) -> None:
        """It leaves the batch before its end, if it was in it: its client has what was drawn."""
        decoded = self._decoded.pop(request_id, None)
        if decoded is None:
            return
        request, drawn = decoded.sequence.request, len(decoded.sequence.output_ids)
        last_s = self._lanes[decoded.lane].last_step_s if decoded.token_s is None else decoded.token_s
        self.gateway.take_part(request_id, request.attempt, drawn, last_s, self._slowest_of(decoded))

    def leave_all(self) -> None:
        for request_id in list(self._decoded):
            self.leave(request_id)

    def _slowest_of(self, decoded: _Decoded) -> float:
        if decoded.token_s is not None:
            return decoded.slowest_s
        slowest_s = self._lanes[decoded.lane].slowest.since(decoded.first_step)
        return max(slowest_s, decoded.slowest_s)

    def _change_lanes(self, rows: Sequence[StepRow], lane: int) -> None:
        for row in rows:
            decoded = self._decoded.get(row.owner.request_id)
            if decoded is not None and decoded.lane != lane:
                decoded.slowest_s = self._slowest_of(decoded)
                decoded.lane, decoded.first_step = lane, self._lanes[lane].slowest.steps

    def _tell_joined(self, taking: _Lane, token_s: float) -> None:
        slowest = taking.slowest
        for decoded in taking.joining:
            decoded.first_step = slowest.steps
            request, output_ids = decoded.sequence.request, decoded.sequence.output_ids
            self.gateway.take_second(request.request_id, request.attempt, len(output_ids) + 1, token_s)
        taking.joining = []
        if not slowest.is_long:
            return
        lane = self._lanes.index(taking)
        firsts = (each.first_step for each in self._decoded.values() if each.lane == lane)
        slowest.forget(min(firsts, default=slowest.steps))
