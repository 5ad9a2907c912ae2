"""A link over Mooncake: first contact that proves who answers, and the pump that keeps slices moving.

Invariants, each bought with a failure seen in Mooncake 0.3.13:

- at most ``submit_window`` slices are outstanding on the link, over all its transfers; the rest waits here;
- ids never leave the pump, and none is asked about after its first terminal answer;
- any failed slice kills the link: what is queued fails at once, what is outstanding is still waited for;
- a dead link stays dead; a peer that still lives, or its next incarnation, gets a link of its own.

The pump is a task that lives while there is work. Mooncake's own waiting calls spin a core; the pump asks and
sleeps, a millisecond or a few, and takes at most ``TURN_S`` of the loop at a time.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from common.transfer.interface import LinkBusy, PeerInfo, PeerTimeout, PeerUnreachable, Run, StalePeer
from common.transfer.mailbox import MAILBOX, NONCE_BYTES, Mailbox
from common.transfer.mooncake import MooncakeEngine, run_in_thread
from common.transfer.regions import Slice
from common.transfer.shared_memory import verify_by_mapping
from common.transfer.transfer import Outbox, Transfer

TURN_S = 0.0005
"""How long the pump may keep the loop at a time."""
CALLS_PER_CLOCK = 16
SHORT_WAIT_S = 0.0002
FEW_SLICES = 4
"""A few slices may be there in 0.1 ms: after sending so few, the pump only yields to the loop for
``SHORT_WAIT_S`` before it sleeps. For more, that would take the time of Mooncake's own thread."""
MIN_SLEEP_S = 0.001
MAX_SLEEP_S = 0.003
OPEN_ATTEMPTS = 2


class MooncakeLink:
    """Writes into one incarnation of one peer through this process's engine."""

    kind = "mooncake"

    def __init__(self, engine: MooncakeEngine, peer: PeerInfo, spelling: str, outbox: Outbox) -> None:
        self.peer = peer
        self._engine = engine
        self.spelling = spelling
        self._outbox = outbox
        self._limits = outbox.limits
        self._remote_base = {region.name: region.base for region in peer.regions}
        self._queue: deque[tuple[Transfer, deque[Slice]]] = deque()
        self._outstanding: deque[tuple[int, Transfer]] = deque()
        self._pump_task: asyncio.Task[None] | None = None
        self._death: str | None = None
        self._is_closing = False

    @property
    def is_alive(self) -> bool:
        return self._death is None and not self._is_closing

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._outstanding

    @property
    def slices_outstanding(self) -> int:
        return len(self._outstanding)

    def write(self, runs: Sequence[Run]) -> Transfer:
        self._engine.check()
        if not self.is_alive:
            raise PeerUnreachable(
                f"the link to peer {self.peer.incarnation[:8]} is dead: {self._death or 'closing'}"
            )
        if len(self._queue) >= self._limits.max_queued_transfers:
            raise LinkBusy(f"{len(self._queue)} transfers wait for peer {self.peer.incarnation[:8]}")
        transfer, slices = self._outbox.begin(
            self.peer, runs, self._remote_base, self._limits.max_slice_bytes
        )
        if slices:
            self._queue.append((transfer, deque(slices)))
        if slices and self._pump_task is None:
            self._pump_task = asyncio.create_task(self._pump(), name=f"pump {self.peer.incarnation[:8]}")
        return transfer

    def die(self, reason: str) -> None:
        """Ends the link, as the control plane saw the peer leave or a slice failed."""
        if self._death is not None:
            return
        self._death = reason
        while self._queue:
            transfer, slices = self._queue.popleft()
            transfer.slices_unsent(len(slices), reason)

    async def close(self) -> None:
        """Sends what is queued, for ``drain_timeout_s`` at most. What is still out then is ``forfeit``."""
        self._is_closing = True
        pump = self._pump_task
        if pump is not None:
            await asyncio.wait([pump], timeout=self._limits.drain_timeout_s)
            pump.cancel()
            await asyncio.wait([pump])
        self.die("closed")

    def forfeit(self) -> None:
        """The engine is gone and its connections with it: what was outstanding will not arrive any more."""
        while self._outstanding:
            _, transfer = self._outstanding.popleft()
            transfer.slice_failed("the engine was closed")

    # -- the pump -------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        sleep_s = MIN_SLEEP_S
        last_submit_s = time.monotonic()
        try:
            while self._queue or self._outstanding:
                turn_ends_s = time.monotonic() + TURN_S
                polled = self._poll(turn_ends_s)
                submitted = self._submit(turn_ends_s)
                now_s = time.monotonic()
                if submitted:
                    last_submit_s = now_s
                if polled or submitted:
                    sleep_s = MIN_SLEEP_S
                if not self._outstanding and not self._queue:
                    break
                is_brief = len(self._outstanding) <= FEW_SLICES and now_s - last_submit_s < SHORT_WAIT_S
                if self._can_submit() or is_brief:
                    await asyncio.sleep(0)
                else:
                    await asyncio.sleep(sleep_s)
                    # With more to send, a longer sleep would let the window run empty.
                    sleep_s = MIN_SLEEP_S if self._queue else min(2 * sleep_s, MAX_SLEEP_S)
        finally:
            self._pump_task = None

    def _can_submit(self) -> bool:
        return bool(self._queue) and len(self._outstanding) < self._limits.submit_window

    def _poll(self, turn_ends_s: float) -> int:
        """Asks about the oldest slices until one is not terminal. Returns how many were."""
        terminal = 0
        while self._outstanding:
            slice_id, transfer = self._outstanding[0]
            has_arrived = self._engine.poll(slice_id)
            if has_arrived is None:
                break
            self._outstanding.popleft()
            terminal += 1
            if has_arrived:
                transfer.slice_arrived()
            else:
                self.die("a slice failed: the peer is gone, stopped, or refused it")
                transfer.slice_failed(self._death or "")
            if terminal % CALLS_PER_CLOCK == 0 and time.monotonic() > turn_ends_s:
                break
        return terminal

    def _submit(self, turn_ends_s: float) -> int:
        """Hands queued slices to the engine while the window and the turn last. Returns how many."""
        submitted = 0
        while self._can_submit():
            transfer, slices = self._queue[0]
            source, destination, nbytes = slices[0]
            slice_id = self._engine.submit_write(self.spelling, source, destination, nbytes)
            if slice_id is None:
                self.die("Mooncake did not take a slice: the peer is unreachable")
                break
            slices.popleft()
            if not slices:
                self._queue.popleft()
            self._outstanding.append((slice_id, transfer))
            submitted += 1
            if submitted % CALLS_PER_CLOCK == 0 and time.monotonic() > turn_ends_s:
                break
        return submitted


async def open_mooncake_link(
    engine: MooncakeEngine, peer: PeerInfo, mailbox: Mailbox, outbox: Outbox
) -> MooncakeLink:
    """First contact. Raises PeerUnreachable, PeerTimeout or StalePeer within ``limits.open_timeout_s``."""
    open_timeout_s = outbox.limits.open_timeout_s
    if peer.address is None:
        raise PeerUnreachable(f"peer {peer.incarnation[:8]} has no Mooncake engine")
    try:
        async with asyncio.timeout(open_timeout_s):
            for attempt in range(OPEN_ATTEMPTS):
                spelling = engine.fresh_spelling(peer.address)
                nonce = await _read_nonce(engine, peer, spelling, mailbox)
                if nonce is not None:
                    break
                if attempt == OPEN_ATTEMPTS - 1:
                    raise PeerUnreachable(f"peer {peer.incarnation[:8]} does not answer at {peer.address}")
    except TimeoutError as exc:
        raise PeerTimeout(
            f"peer {peer.incarnation[:8]} at {peer.address}: no first contact in {open_timeout_s:g} s"
        ) from exc
    if nonce != peer.incarnation:
        raise StalePeer(f"{peer.address} answers as another process than {peer.incarnation[:8]}")
    return MooncakeLink(engine, peer, spelling, outbox)


async def _read_nonce(engine: MooncakeEngine, peer: PeerInfo, spelling: str, mailbox: Mailbox) -> str | None:
    """The first bytes of the peer's mailbox as hex; None when it cannot be reached.

    The probe comes first because a mute peer hangs it without harm, while it would hang the read with the
    engine's mutex held, and with it every other link.
    """
    if not await run_in_thread(lambda: engine.probe(spelling), "mooncake-probe"):
        return None
    await engine.first_contact.acquire()
    slot = mailbox.reserve()
    remote = peer.region(MAILBOX).base

    def read() -> str | None:
        if not engine.reads_host_memory:
            verify_by_mapping(peer)
            return peer.incarnation if engine.open_segment(spelling) else None
        has_read = engine.read(spelling, mailbox.address_of(slot), remote, NONCE_BYTES)
        return mailbox.read(slot).hex() if has_read else None

    def free(_: "asyncio.Future[str | None]") -> None:
        # Only when the thread has returned is the mutex free and the slot quiet, not when a waiter gives up.
        engine.first_contact.release()
        mailbox.release(slot)

    reading = run_in_thread(read, "mooncake-first-contact")
    reading.add_done_callback(free)
    return await asyncio.shield(reading)
