"""An instance's prefill room in virtual time: its live state, driven as ``prefill.service`` drives it."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.errors import HandoverFailed, KVLinkBroken, RequestError
from common.kv.blocks import BlockOwner
from common.kv.link_watch import LinkWatch
from common.messages import (
    DecodeTask,
    ErrorReply,
    KVDelivered,
    OfferWithdrawn,
    Placement,
    PlaceMoved,
    PullKV,
    SampledToken,
    as_request_error,
    error_reply,
)
from common.performance import PromptTime
from common.sequences import PublishFailure
from prefill import events
from prefill.sequence import ROOM
from prefill.state import PrefillState
from services.simulator.gateway import END_TOKEN, TOKEN
from services.simulator.mesh import Engine, Mesh, PullAnswer, receivers_of
from services.simulator.prefixes import InstancePrefixes

DRAWN, ENDING = SampledToken(TOKEN), SampledToken(END_TOKEN)


@dataclass(slots=True, eq=False)
class PrefillRoom:
    """``links``: what carries its KV. ``keep_here`` gives a sequence that is to be decoded here to the decode
    room; ``on_change`` is called after every event. ``chunk_tokens``, ``sent_bytes``, ``handovers`` and how
    long these waited to begin: since the start. ``prefixes``: what prompts need no computing of, if somebody
    keeps that; ``_whole``: chunks in flight."""

    state: PrefillState
    mesh: Mesh
    engine: Engine
    links: LinkWatch
    prompt_time: PromptTime | None
    keep_here: Callable[[events.KeepHere], None]
    on_change: Callable[[], None]
    is_alive: bool = True
    chunk_tokens: int = 0
    sent_bytes: int = 0
    handovers: int = 0
    handover_wait_s: float = 0.0
    prefixes: InstancePrefixes | None = None
    _whole: deque[tuple[events.ChunkSlice, ...]] = field(default_factory=deque)
    _pulls: dict[tuple[BlockOwner, int], PullAnswer] = field(default_factory=dict)

    @property
    def hit_tokens(self) -> int:
        return 0 if self.prefixes is None else self.prefixes.hit_tokens

    def handle(self, event: events.PrefillEvent) -> None:
        """Raises as the state does."""
        self.engine.catch_up()
        self._decide(event, self.mesh.network.clock.now)
        # A prompt that lacks memory may be given way to when a step ends.
        self.engine.look_ahead()

    def _decide(self, event: events.PrefillEvent, now: float) -> None:
        for command in self.state.handle(event, now):
            COMMANDS[type(command)](self, command)
        self.on_change()

    def take_pull(self, pull: PullKV, answer: PullAnswer) -> None:
        key = (BlockOwner(ROOM, pull.request_id, pull.attempt), pull.portion)
        self._pulls[key] = answer
        try:
            self._handle_amid_chunk(events.PullArrived(pull))
        except RequestError as exc:
            del self._pulls[key]
            refusal = exc
            self.mesh.network.tell(lambda: answer(refusal))

    def _handle_amid_chunk(self, event: events.PrefillEvent) -> None:
        """One that may want KV of layers that are computed by now."""
        layers = self.engine.layers_done()
        if layers:
            self.handle(events.LayersComputed(layers))
        self.handle(event)
        self.engine.look_at_layers()

    # the engine's

    def choose_work(self, now: float) -> None:
        self._decide(events.PassDue(), now)

    def end_chunk(self, slices: Sequence[events.ChunkSlice]) -> None:
        self.chunk_tokens += sum(piece.tokens for piece in slices)
        if self.prefixes is not None:
            slices = self._whole.popleft()
            self.prefixes.note_computed(slices)
        self.handle(events.ChunkFinished(tuple(map(self._token_after, slices))))

    def _token_after(self, piece: events.ChunkSlice) -> SampledToken | None:
        if not piece.is_last:
            return None
        left = self.mesh.gateway.length_left(piece.request, len(piece.request.output_ids))
        return ENDING if left == 1 else DRAWN

    def advance_chunk(self) -> None:
        self.handle(events.ChunkAdvanced())

    def end_layers(self, layers: int) -> None:
        self.handle(events.LayersComputed(layers))

    def wants_layers(self) -> bool:
        for piece in self.state.chunks.slices:
            hand_over = self.state.sequences[piece.owner].hand_over
            if hand_over.asked is not None and not hand_over.is_sending:
                return True
        return False

    # commands

    def _run_chunk(self, command: events.RunChunk) -> None:
        if self.prefixes is None:
            self.engine.wait_chunk(command)
        else:
            self._run_rest(command, self.prefixes)

    def _run_rest(self, command: events.RunChunk, prefixes: InstancePrefixes) -> None:
        """What is kept of it already is brought here first."""
        self._whole.append(command.slices)
        slices, loading_s = prefixes.reuse(command.slices)

        rest = command.of(slices)

        def begin() -> None:
            if self.is_alive:
                self.engine.wait_chunk(rest)

        if loading_s > 0:
            self.mesh.network.clock.after(loading_s, begin)
        else:
            begin()

    def _publish_token(self, command: events.PublishToken) -> None:
        self.mesh.gateway.take_first(command.event, command.queue_s)

    def _publish_failure(self, command: PublishFailure) -> None:
        self.mesh.gateway.take_failure(command.failure)

    def _publish_move(self, command: events.PublishMove) -> None:
        self.mesh.gateway.take_move(command.moved)

    def _offer(self, command: events.OfferSequence) -> None:
        task = msgspec.structs.replace(command.task, prompt_time=self.prompt_time)
        self.mesh.network.tell(lambda: self._deliver_offer(command, task))

    def _deliver_offer(self, command: events.OfferSequence, task: DecodeTask) -> None:
        receiver = self.mesh.find(command.decode_instance)
        if receiver is None:
            lost = ErrorReply(HandoverFailed.code, "the decode instance did not answer")
            self._refuse_offer(command, lost, is_lost=True)
            return
        try:
            receiver.take_sequence(task)
        except RequestError as exc:
            self._refuse_offer(command, error_reply(exc), is_lost=False)

    def _refuse_offer(self, command: events.OfferSequence, error: ErrorReply, *, is_lost: bool) -> None:
        refused = events.OfferRefused(command.owner, error, is_lost, command.task.is_early)
        self.mesh.network.tell(lambda: self.handle(refused) if self.is_alive else None)

    def _keep_here(self, command: events.KeepHere) -> None:
        task = msgspec.structs.replace(command.task, prompt_time=self.prompt_time)
        self.keep_here(events.KeepHere(command.held_by, task))

    def _withdraw(self, command: events.WithdrawOffer) -> None:
        owner, life = command.owner, (self.state.instance_id, self.state.incarnation)
        self.mesh.tell(command.decode_instance, OfferWithdrawn(owner.request_id, owner.attempt, *life))

    def _seek_decode(self, command: events.SeekDecode) -> None:
        owner = command.owner

        def answer(reply: Placement | RequestError) -> None:
            if not self.is_alive:
                return
            if isinstance(reply, Placement):
                self.handle(events.DecodeFound(owner, reply))
            else:
                self.handle(events.DecodeNotFound(owner, error_reply(reply)))

        life = self.mesh.life_of(self.state.instance_id)
        self.mesh.place_moved(PlaceMoved(command.request, life, command.wanted, command.refused), answer)

    def _send_kv(self, command: events.SendKV) -> None:
        owner, pull = command.owner, command.pull
        ends = (self.state.instance_id, pull.decode_instance)
        parts = sum(len(span.layers) * len(span.positions) for span in command.spans)
        nbytes = parts * self.state.layout.token_layer_bytes
        clock, timeline = self.mesh.network.clock, self.mesh.network.timeline
        began_s = clock.now

        def arrive() -> None:
            if self.is_alive:
                self.sent_bytes += nbytes
                self.links.note_worked(*ends)
                if timeline is not None:
                    layers = _layers_of(command)
                    times = (began_s, clock.now)
                    timeline.add_transfer(self.state.instance_id, pull, nbytes, layers, *times)
                self._handle_amid_chunk(events.SendFinished(owner, nbytes, clock.now - began_s))

        def fail() -> None:
            if self.is_alive:
                error = ErrorReply(KVLinkBroken.code, "the transfer failed")
                self._handle_amid_chunk(events.SendFailed(owner, error))

        def suspect() -> None:
            if self.is_alive:
                self.links.note_failed(*ends)

        self.mesh.network.send_kv(self.state.instance_id, receivers_of(pull), nbytes, arrive, fail, suspect)

    def _answer_pull(self, command: events.AnswerPull) -> None:
        answer, told = self._pulls.pop((command.owner, command.portion)), command.answer
        reply: KVDelivered | RequestError = as_request_error(told) if isinstance(told, ErrorReply) else told
        self.mesh.network.tell(lambda: answer(reply))

    def _note_hand_over(self, command: events.HandOverBegun) -> None:
        self.handovers += 1
        self.handover_wait_s += command.queue_s


def _layers_of(command: events.SendKV) -> range:
    """From the first to the last."""
    first = min((span.layers.start for span in command.spans), default=0)
    return range(first, max((span.layers.stop for span in command.spans), default=first))


COMMANDS: dict[type, Callable[[PrefillRoom, Any], None]] = {
    events.RunChunk: PrefillRoom._run_chunk,
    events.PublishToken: PrefillRoom._publish_token,
    events.PublishMove: PrefillRoom._publish_move,
    events.OfferSequence: PrefillRoom._offer,
    events.SeekDecode: PrefillRoom._seek_decode,
    events.KeepHere: PrefillRoom._keep_here,
    events.WithdrawOffer: PrefillRoom._withdraw,
    events.SendKV: PrefillRoom._send_kv,
    events.AnswerPull: PrefillRoom._answer_pull,
    events.HandOverBegun: PrefillRoom._note_hand_over,
    PublishFailure: PrefillRoom._publish_failure,
}
