"""Open connections to instances, over which nothing is ever said: that one closes says that its process may
have ended, at once, where silence says so a lease later.

A process's sockets are closed with it, whoever ended it. It is over where its HTTP port refuses and nobody
serves its calls on the bus, both: a NATS that begins anew, a drain's last moments or a proxy that closes what
idles look otherwise. A hang or a host that is gone closes nothing, and a firewall may let nothing through:
silence finds those.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from common.bus import Bus
from common.errors import BusTimeout, LamellaError, NoResponder
from common.messages import Acknowledged, AreYouThere, InstanceLife, InstanceRecord, MemberRecord
from common.subjects import Subjects

log = logging.getLogger("lamella.scheduler")

CONNECT_TIMEOUT_S = 1.0
RETRY_S, LONGEST_RETRY_S = 1.0, 16.0
"""Between two tries where nothing answers: twice as long each time."""
SETTLE_S = 0.02
"""From a connection's end until NATS has seen that of its own, mostly."""
ANSWER_TIMEOUT_S = 0.25
"""Of a call that went to a process as it died, which nobody answers."""


@dataclass(slots=True, eq=False)
class _Line:
    life: InstanceLife
    host: str
    port: int
    writer: asyncio.StreamWriter | None = None


@dataclass(slots=True)
class Lifelines:
    """``tell``: of a life that is over. ``spawn`` starts a task in the process's task group."""

    bus: Bus
    subjects: Subjects
    tell: Callable[[InstanceLife], None]
    spawn: Callable[[Coroutine[None, None, None]], None]
    _lines: dict[InstanceLife, _Line] = field(default_factory=dict)

    def keep(self, members: Iterable[MemberRecord]) -> None:
        """One to each of these that is an instance, and to nobody else."""
        records = {each.life: each for each in members if isinstance(each, InstanceRecord)}
        for life in self._lines.keys() - records.keys():
            self._cut(self._lines[life])
        for life in records.keys() - self._lines.keys():
            address = urlsplit(records[life].http_url)
            if address.hostname and address.port:
                line = self._lines[life] = _Line(life, address.hostname, address.port)
                self.spawn(self._watch(line))

    def _cut(self, line: _Line) -> None:
        """Its watch ends when it next looks."""
        del self._lines[line.life]
        if line.writer is not None:
            line.writer.close()

    def _is_kept(self, line: _Line) -> bool:
        return self._lines.get(line.life) is line

    async def _watch(self, line: _Line) -> None:
        """As long as the store has it: one that was wrongly told to be over may be back."""
        has_told, pause_s, loop = False, SETTLE_S, asyncio.get_running_loop()
        while self._is_kept(line):
            began_s = loop.time()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, line.writer = await asyncio.open_connection(line.host, line.port)
            except ConnectionRefusedError:
                if not has_told and await self._is_unserved(line):
                    has_told = True
                    log.warning("instance_process_ended", extra={"instance": line.life.instance_id})
                    self.tell(line.life)
                pause_s = min(max(2 * pause_s, RETRY_S), LONGEST_RETRY_S)
            except OSError:
                pause_s = min(max(2 * pause_s, RETRY_S), LONGEST_RETRY_S)
            else:
                has_told = False
                await self._wait_closed(line, reader, line.writer)
                was_short = loop.time() - began_s < RETRY_S
                pause_s = min(2 * pause_s, RETRY_S) if was_short else SETTLE_S
            await asyncio.sleep(pause_s)

    async def _wait_closed(
        self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            if self._is_kept(line):
                await reader.read(1)
        except OSError:
            pass
        finally:
            writer.close()

    async def _is_unserved(self, line: _Line) -> bool:
        """Whether nobody serves its calls. One that is lost on the way to a dead process says nothing: NATS
        may not have seen its end. Where the bus itself is away nobody knows."""
        subject = self.subjects.instance_calls(line.life.instance_id)
        while self._is_kept(line):
            try:
                await self.bus.call(subject, AreYouThere(), Acknowledged, ANSWER_TIMEOUT_S)
            except NoResponder:
                return True
            except BusTimeout:
                continue
            except LamellaError:
                return False
            else:
                return False
        return False
