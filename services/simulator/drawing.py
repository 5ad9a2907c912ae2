"""Which sequences an instance's decode room draws for, and what their clients see of its steps: no token is
looked at by itself, and what a step costs here does not depend on how many sequences it has."""

from dataclasses import dataclass, field

from common.ids import RequestId
from common.kv.blocks import BlockOwner
from common.messages import TokenEvent
from decode.sequence import DecodeSequence
from decode.state import DecodeState
from services.simulator.gaps import GapCounts, SlowestSteps
from services.simulator.gateway import SimulatedGateway


@dataclass(slots=True)
class _Decoded:
    """A sequence that is in the batch: its first token here was that of the instance's ``first_step``."""

    sequence: DecodeSequence
    first_step: int


@dataclass(slots=True)
class Drawing:
    """``fresh``: whom no step has taken yet. ``steps``, and ``rows`` of all of them, since the start.
    ``gaps``: between tokens, but for the first ones of this room, of which the gateway knows. A step that a
    sequence sits out, as there is no block for it, makes two gaps of one."""

    decode: DecodeState
    gateway: SimulatedGateway
    gaps: GapCounts = field(default_factory=GapCounts)
    steps: int = 0
    rows: int = 0
    fresh: list[BlockOwner] = field(default_factory=list)
    _decoded: dict[RequestId, _Decoded] = field(default_factory=dict)
    _joining: list[_Decoded] = field(default_factory=list)
    _slowest: SlowestSteps = field(default_factory=SlowestSteps)
    _last_step_s: float = 0.0

    def begin_step(self) -> None:
        """Those of the fresh ones that this step takes join."""
        if not self.fresh:
            return
        waiting = []
        for owner in self.fresh:
            sequence = self.decode.sequences.get(owner)
            if sequence is None:
                continue
            if self.decode.batches.computes(owner):
                decoded = self._decoded[owner.request_id] = _Decoded(sequence, self._slowest.steps)
                self._joining.append(decoded)
            else:
                waiting.append(owner)
        self.fresh = waiting

    def end_steps(self, rows: int, steps: int, first_end_s: float, ended_s: float, last_s: float) -> None:
        """Of so many rows: the first of them ended then, and the last then, after ``last_s``."""
        slowest = self._slowest
        self.steps += steps
        self.rows += steps * rows
        staying = rows - len(self._joining)
        if staying:
            gap_s = first_end_s - self._last_step_s
            self.gaps.add(gap_s, staying)
            slowest.add(1, gap_s)
        if self._joining:
            self._tell_joined(first_end_s)
        if steps > 1:
            self.gaps.add((ended_s - first_end_s) / (steps - 1), rows * (steps - 1))
            slowest.add(steps - 1, last_s)
        self._last_step_s = ended_s

    def end_sequence(self, last: TokenEvent) -> None:
        decoded = self._decoded.pop(last.request_id)
        self.gateway.take_last(last, self._slowest.since(decoded.first_step))

    def leave(self, request_id: RequestId) -> None:
        """It leaves the batch before its end, if it was in it: its client has what was drawn."""
        decoded = self._decoded.pop(request_id, None)
        if decoded is None:
            return
        request, drawn = decoded.sequence.request, len(decoded.sequence.output_ids)
        slowest_s = self._slowest.since(decoded.first_step)
        self.gateway.take_part(request_id, request.attempt, drawn, self._last_step_s, slowest_s)

    def _tell_joined(self, token_s: float) -> None:
        slowest = self._slowest
        for decoded in self._joining:
            decoded.first_step = slowest.steps
            request, output_ids = decoded.sequence.request, decoded.sequence.output_ids
            self.gateway.take_second(request.request_id, request.attempt, len(output_ids) + 1, token_s)
        self._joining = []
        slowest.forget(min((each.first_step for each in self._decoded.values()), default=slowest.steps))
