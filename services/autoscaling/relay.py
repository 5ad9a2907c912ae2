"""`lamella relay`: says on its standard output what the schedulers plan and operators wish.

Runs inside the mesh for an autoscaler outside, and ends with it: when its standard input does.
"""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from common.bus import Bus
from common.config import Config
from common.errors import BusUnavailable, LauncherError
from common.messages import DrainWish, ScaleWish
from common.scaling import DesiredCounts
from common.subjects import Subjects
from services.autoscaling.lines import (
    MAX_LINE_BYTES,
    Answered,
    Began,
    Line,
    Planned,
    Wished,
    decode_answer,
    encode,
)
from services.launcher.wish_calls import WishCalls
from services.launcher.wishes import RoleChange, Wishes

CONNECT_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Relay:
    """``open``: wishes that the autoscaler has not answered yet, by number."""

    say: Callable[[Line], None]
    open: dict[int, asyncio.Future[str | None]] = field(default_factory=dict)
    said: int = 0

    def tell_plan(self, plan: DesiredCounts) -> None:
        self.say(Planned(plan))

    async def scale(self, wishes: Wishes) -> list[RoleChange]:
        """Of counts. What has changed the autoscaler says where it runs. Raises LauncherError."""
        for role, wish in wishes.items():
            await self._pass_on(ScaleWish(role, wish.number))
        return []

    async def drain(self, service_id: str) -> None:
        """Raises LauncherError."""
        await self._pass_on(DrainWish(service_id))

    def take(self, answer: Answered) -> None:
        answered = self.open.get(answer.number)
        if answered is not None and not answered.done():
            answered.set_result(answer.refusal)

    def give_up(self) -> None:
        """The autoscaler has ended."""
        for number in list(self.open):
            self.take(Answered(number, "the autoscaler ended before it was so"))

    async def _pass_on(self, wish: ScaleWish | DrainWish) -> None:
        self.said += 1
        number, answered = self.said, asyncio.get_running_loop().create_future()
        self.open[number] = answered
        try:
            self.say(Wished(number, wish))
            refusal = await answered
        finally:
            del self.open[number]
        if refusal is not None:
            raise LauncherError(refusal)


async def run_relay(config: Config, *, takes_wishes: bool) -> None:
    """Until standard input ends. Raises BusError, perhaps in a group, where NATS is out of reach or is lost:
    what comes after it may be another mesh, with a NATS of its own."""
    answers = await _standard_input()
    subjects = Subjects(config.mesh.namespace)
    relay, disconnected = Relay(_say), asyncio.Event()
    bus = Bus(config.mesh.nats_url, name=f"relay-{secrets.token_hex(3)}", subjects=subjects)
    try:
        await bus.connect(CONNECT_TIMEOUT_S)
        async with asyncio.TaskGroup() as tasks:
            bus.on_disconnect.append(disconnected.set)
            lost = tasks.create_task(_fail_when(disconnected))
            _say(Began(config.scaling.policy, config.scaling.window_s, config.roles.policy))
            await bus.subscribe(subjects.scaling(), DesiredCounts, relay.tell_plan)
            if takes_wishes:
                await WishCalls(relay.scale, relay.drain, tasks, subjects).serve(bus)
            async for line in answers:
                relay.take(decode_answer(line))
            relay.give_up()
            lost.cancel()
    finally:
        await bus.close()


async def _fail_when(disconnected: asyncio.Event) -> None:
    await disconnected.wait()
    raise BusUnavailable("the connection to NATS was lost")


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _say(line: Line) -> None:
    with contextlib.suppress(BrokenPipeError):  # standard input ends, too
        sys.stdout.buffer.write(encode(line) + b"\n")
        sys.stdout.buffer.flush()
