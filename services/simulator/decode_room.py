"""An instance's decode room in virtual time: its live state, driven as ``decode.service`` drives it.

Its KV lies with it, or on attention workers, between which sequences move. Nobody inherits KV here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.errors import HandoverFailed, InstanceLost, KVLinkBroken, RequestCancelled, RequestError
from common.ids import InstanceId
from common.kv.blocks import BlockOwner, in_pool, pool_of
from common.kv.layout import KVLayout
from common.kv.link_watch import LinkWatch
from common.messages import (
    ErrorReply,
    InstanceGone,
    InstanceLife,
    KVDelivered,
    KVDestination,
    OfferDeclined,
    Placement,
    PlaceMoved,
    PullKV,
    SequenceMoved,
    error_reply,
)
from common.sequences import PublishFailure
from decode import events
from decode.homes import HOME_RETRY_S
from decode.sequence import ROOM
from decode.state import DecodeState
from services.simulator.attention_cost import PoolRows
from services.simulator.drawing import Drawing
from services.simulator.mesh import Engine, Mesh, PullAnswer
from services.simulator.prefill_room import DRAWN, ENDING


@dataclass(slots=True, eq=False)
class DecodeRoom:
    """``is_exact``: every sequence draws as many tokens as it may. ``hand_on`` gives one that leaves to the
    prefill room; ``on_change`` is called after every event. ``destinations``: where KV for a pool goes, over
    ``links``.
    ``admission_wait_s``: of all ``admissions``. ``_pulls``: of whom a portion is asked for; ``_adrift``: of
    whom it may still come, though it was given up; ``_rows``: of each lane's newest step."""

    state: DecodeState
    mesh: Mesh
    engine: Engine
    links: LinkWatch
    layout: KVLayout
    host_bytes_per_s: float
    is_exact: bool
    hand_on: Callable[[events.HandOn], None]
    on_change: Callable[[], None]
    destinations: dict[int, tuple[KVDestination, ...]]
    drawing: Drawing = field(init=False)
    is_alive: bool = True
    admissions: int = 0
    admission_wait_s: float = 0.0
    moves: int = 0
    _pulls: dict[BlockOwner, InstanceLife] = field(default_factory=dict)
    _adrift: dict[BlockOwner, InstanceLife] = field(default_factory=dict)
    _rows: list[tuple[events.StepRow, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.drawing = Drawing(self.state, self.mesh.gateway)
        self._rows = [() for _ in range(self.state.lanes)]

    def handle(self, event: events.DecodeEvent) -> None:
        """Raises as the state does."""
        self.engine.catch_up()
        self._decide(event, self.mesh.network.clock.now)
        self.engine.look_ahead()

    def take_stayed(self, event: events.SequenceStayed) -> None:
        """This instance's prefill room has computed it."""
        request = event.task.request
        self.drawing.fresh.append(BlockOwner(ROOM, request.request_id, request.attempt))
        self.handle(event)

    def _decide(self, event: events.DecodeEvent, now: float) -> None:
        for command in self.state.handle(event, now):
            COMMANDS[type(command)](self, command)
        self.on_change()

    # the engine's

    def choose_work(self, now: float) -> None:
        self._decide(events.PassDue(), now)

    def shape(self, lane: int = 0) -> tuple[int, int]:
        """(sequences, tokens of context) of the step that is due."""
        return len(self._rows[lane]), self.state.context_of_step(lane)

    def rows_by_pool(self, lane: int) -> tuple[PoolRows, ...]:
        """The same of each KV pool."""
        pools = self.state.blocks.pools
        if len(pools) == 1:
            return (PoolRows(pools[0], *self.shape(lane)),)
        found: dict[int, list[int]] = {}
        for row in self._rows[lane]:
            found.setdefault(pool_of(row.block_table[0]), []).append(row.position + 1)
        return tuple(PoolRows(pool, len(contexts), sum(contexts)) for pool, contexts in found.items())

    def steps_ahead(self, lane: int = 0) -> int:
        ahead = self.state.steps_ahead(lane)
        if self.is_exact or ahead == 1:
            return ahead
        return min(ahead, *map(self._left, self._rows[lane]))

    def _left(self, row: events.StepRow) -> int:
        return self.mesh.gateway.length_left(row.request, len(row.output_ids))

    def end_steps(self, steps: int, first_end_s: float, ended_s: float, last_s: float, lane: int = 0) -> None:
        self.drawing.end_steps(len(self._rows[lane]), steps, first_end_s, ended_s, last_s, lane)
        self.tell_steps(steps, ended_s, lane)

    def count_steps(
        self, steps: int, first_end_s: float, ended_s: float, last_s: float, lane: int, slowest_s: float
    ) -> None:
        """What they took; the state is told of them later."""
        rows = len(self._rows[lane])
        self.drawing.end_steps(rows, steps, first_end_s, ended_s, last_s, lane, slowest_s)
        self.state.pulls.count_steps(lane, ended_s, steps)

    def tell_steps(self, steps: int, ended_s: float, lane: int) -> None:
        """What they took is counted."""
        rows = self._rows[lane]
        tokens = (DRAWN,) * len(rows)
        if not self.is_exact:
            tokens = tuple(ENDING if self._left(row) == steps else DRAWN for row in rows)
        self._decide(events.StepsFinished(steps, tokens, DRAWN, lane), ended_s)

    # commands

    def _run_step(self, command: events.RunStep) -> None:
        self._rows[command.lane] = command.rows
        self.drawing.begin_step(command.rows, command.lane)
        self.engine.wait_step(command.lane)

    def _publish_ends(self, command: events.PublishTokens) -> None:
        """StepsFinished names those alone that have ended."""
        for event in command.events:
            self.drawing.end_sequence(event)

    def _publish_failure(self, command: PublishFailure) -> None:
        self.drawing.leave(command.failure.request_id)
        self.mesh.gateway.take_failure(command.failure)

    def _pull(self, command: events.PullSequence) -> None:
        owner, pool = command.owner, pool_of(command.blocks[0])
        pull = PullKV(
            request_id=owner.request_id,
            attempt=owner.attempt,
            prefill_incarnation=command.prefill_incarnation,
            decode_instance=self.state.instance_id,
            blocks=in_pool(command.blocks) if pool else command.blocks,
            layout=self.layout,
            destinations=self.destinations[pool],
            portion=command.portion,
            max_bytes=command.max_bytes,
        )
        sender_id = command.prefill_instance
        self._pulls[owner] = InstanceLife(sender_id, command.prefill_incarnation)
        take = partial(self._take_reply, owner, sender_id, pull, self.mesh.network.clock.now)
        self.mesh.network.tell(partial(self._ask_sender, owner, sender_id, pull, take))

    def _ask_sender(self, owner: BlockOwner, sender_id: InstanceId, pull: PullKV, take: PullAnswer) -> None:
        sender = self.mesh.find(sender_id)
        if sender is not None:
            sender.take_pull(pull, take)
        else:
            self.mesh.network.tell(lambda: self._miss_sender(owner))

    def _take_reply(
        self,
        owner: BlockOwner,
        sender_id: InstanceId,
        pull: PullKV,
        began_s: float,
        reply: KVDelivered | RequestError,
    ) -> None:
        network = self.mesh.network
        if network.timeline is not None and isinstance(reply, KVDelivered):
            network.timeline.add_pull(pull, sender_id, reply.kv_bytes, began_s, network.clock.now)
        if self._pulls.pop(owner, None) is not None:
            self._take_portion(owner, sender_id, reply)
        else:
            self._end_adrift(owner)

    def _take_portion(self, owner: BlockOwner, sender: InstanceId, reply: KVDelivered | RequestError) -> None:
        if not self.is_alive:
            return
        if isinstance(reply, KVDelivered) and reply.kv_bytes:
            self.links.note_worked(sender, self.state.instance_id)
        elif isinstance(reply, KVLinkBroken):
            self.links.note_failed(sender, self.state.instance_id)
        match reply:
            case KVDelivered(is_last=True):
                self.drawing.fresh.append(owner)
                measured = (reply.kv_bytes, reply.transfer_s)
                self.handle(events.PullFinished(owner, reply.first_token, *measured))
            case KVDelivered():
                self.handle(events.PortionPulled(owner, reply.kv_bytes, reply.transfer_s))
            case HandoverFailed() | InstanceLost():
                self._fail_pull(owner, None)
            case RequestCancelled():
                self.handle(events.SequenceEnded(owner))
            case RequestError():
                self.handle(events.PullFailed(owner, error_reply(reply), is_drained=True))

    def _fail_pull(self, owner: BlockOwner, lost: InstanceId | None, *, is_drained: bool = True) -> None:
        """A modelled link carries nothing any more once its transfer has failed."""
        error = ErrorReply(HandoverFailed.code, "the pull failed")
        self.handle(events.PullFailed(owner, error, is_drained=is_drained, lost_instance=lost))

    def _miss_sender(self, owner: BlockOwner) -> None:
        """Nobody answers there."""
        sender = self._pulls.pop(owner, None)
        if sender is not None and self.is_alive:
            self._fail_pull(owner, sender.instance_id)

    def give_up(self, gone: InstanceGone) -> None:
        """Everybody is told that it is gone. If it lives nevertheless, it may go on sending."""
        life = InstanceLife(gone.instance_id, gone.incarnation)
        is_sending = self.mesh.is_alive(life)
        for owner in [owner for owner, sender in self._pulls.items() if sender == life]:
            del self._pulls[owner]
            if is_sending:
                self._adrift[owner] = life
            self._fail_pull(owner, life.instance_id, is_drained=not is_sending)

    def note_ended(self, life: InstanceLife) -> None:
        """That one sends nothing any more."""
        for owner in [owner for owner, sender in self._adrift.items() if sender == life]:
            self._end_adrift(owner)

    def _end_adrift(self, owner: BlockOwner) -> None:
        if self._adrift.pop(owner, None) is not None and self.is_alive:
            self.handle(events.PullDrained(owner))

    def end(self) -> None:
        """Its clients have what was drawn until now."""
        self.is_alive = False
        self.drawing.leave_all()

    def _move(self, command: events.MoveSequence) -> None:
        """From a pool's workers to another's, of which each has the same heads."""
        owner, pools = (
            command.owner,
            [pool_of(each[0]) for each in (command.blocks, command.destination_blocks)],
        )
        senders, receivers = (
            [InstanceId(each.endpoint.decode()) for each in self.destinations[pool]] for pool in pools
        )
        left, has_failed = len(senders), False

        def end(*, is_there: bool) -> None:
            nonlocal left, has_failed
            left, has_failed = left - 1, has_failed or not is_there
            if left or not self.is_alive:
                return
            self.moves += 1
            if has_failed or any(self.state.blocks.is_lost_pool(pool) for pool in pools):
                self.handle(events.MoveFailed(owner))
                self.handle(events.MoveDrained(owner))
            else:
                self.handle(events.MoveFinished(owner))

        for sender, receiver in zip(senders, receivers, strict=True):
            nbytes = command.tokens * self.layout.token_bytes / len(senders)
            ends = partial(end, is_there=True), partial(end, is_there=False)
            self.mesh.network.send_kv(sender, [receiver], nbytes, *ends)

    def _swap(self, command: events.SwapOut | events.SwapIn) -> None:
        owner, nbytes = command.owner, len(command.host_blocks) * self.layout.block_bytes
        copy_s = nbytes / self.host_bytes_per_s
        is_back = isinstance(command, events.SwapIn)

        def end() -> None:
            if not self.is_alive:
                return
            if is_back:
                self.drawing.fresh.append(owner)
            self.handle(events.SwapFinished(owner, nbytes, copy_s))

        if not is_back:
            self.drawing.leave(owner.request_id)
        self.mesh.network.clock.after(copy_s, end)

    def _seek_home(self, command: events.SeekHome) -> None:
        owner = command.owner

        def answer(reply: Placement | RequestError) -> None:
            if not self.is_alive:
                return
            if isinstance(reply, Placement):
                self.handle(events.HomeFound(owner, reply))
            elif self.state.departures.is_leaving:
                self.mesh.network.clock.after(HOME_RETRY_S, ask)
            else:
                self.handle(events.SearchEnded(owner))

        def ask() -> None:
            if not self.is_alive:
                return
            if self.state.departures.is_sought(owner):
                life = self.mesh.life_of(self.state.instance_id)
                self.mesh.place_moved(PlaceMoved(command.request, life, command.wanted), answer)
            else:
                self.handle(events.SearchEnded(owner))

        ask()

    def _decline(self, command: events.DeclineOffer) -> None:
        owner = command.owner
        declined = OfferDeclined(owner.request_id, owner.attempt, self.state.instance_id, command.wanted)
        self.mesh.tell(command.prefill_instance, declined)

    def _hand_on(self, command: events.HandOn) -> None:
        owner = command.owner
        self.drawing.leave(owner.request_id)
        drawn = len(command.request.output_ids)
        self.mesh.gateway.take_move(SequenceMoved(owner.request_id, owner.attempt, command.home, drawn))
        self.hand_on(command)

    def _note_admission(self, command: events.ObserveAdmission) -> None:
        self.admissions += 1
        self.admission_wait_s += command.queue_s


COMMANDS: dict[type, Callable[[DecodeRoom, Any], None]] = {
    events.RunStep: DecodeRoom._run_step,
    events.PublishTokens: DecodeRoom._publish_ends,
    events.PullSequence: DecodeRoom._pull,
    events.MoveSequence: DecodeRoom._move,
    events.SwapOut: DecodeRoom._swap,
    events.SwapIn: DecodeRoom._swap,
    events.SeekHome: DecodeRoom._seek_home,
    events.DeclineOffer: DecodeRoom._decline,
    events.HandOn: DecodeRoom._hand_on,
    events.ObserveAdmission: DecodeRoom._note_admission,
    PublishFailure: DecodeRoom._publish_failure,
}
