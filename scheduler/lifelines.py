"""Open connections to instances and attention workers, over which nothing is ever said: that one closes says
that its process may have ended, at once, where silence says so later.

A process's sockets are closed with it, whoever ended it. It is over where a connection that was open has
closed, none can be opened again, and nobody serves its calls on the bus, all three: a NATS that begins anew,
a drain's last moments or a proxy that closes what idles look otherwise. A hang or a host that is gone closes
nothing, and a firewall may let nothing through: silence finds those.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from common.bus import Bus
from common.errors import BusTimeout, LamellaError, NoResponder
from common.ids import Incarnation
from common.messages import Acknowledged, AreYouThere, InstanceRecord, MemberRecord
from common.subjects import Subjects
from scheduler.membership import SEEN_AFTER_S

log = logging.getLogger("lamella.scheduler")

CONNECT_TIMEOUT_S = 1.0
RETRY_S, LONGEST_RETRY_S = 1.0, 16.0
"""Between two tries where nothing answers: twice as long each time."""
ANSWER_TIMEOUT_S = 0.25
"""Of a call that went to a process as it died, which nobody answers."""


@dataclass(slots=True, eq=False)
class _Line:
    """``subject``: of its calls."""

    name: str
    record: MemberRecord
    subject: str
    writer: asyncio.StreamWriter | None = None

    @property
    def life(self) -> tuple[str, Incarnation]:
        return self.name, self.record.incarnation


@dataclass(slots=True)
class Lifelines:
    """``tell``: of a life that is over. ``spawn`` starts a task in the process's task group. ``open``: how
    many there are. ``retry_s``: as RETRY_S."""

    bus: Bus
    subjects: Subjects
    tell: Callable[[MemberRecord], None]
    spawn: Callable[[Coroutine[None, None, None]], None]
    retry_s: float = RETRY_S
    open: int = 0
    _lines: dict[tuple[str, Incarnation], _Line] = field(default_factory=dict)

    def keep(self, members: Iterable[MemberRecord]) -> None:
        """One to each of these that is an instance or an attention worker, and to nobody else."""
        found = {line.life: line for each in members if (line := self._line_to(each)) is not None}
        for life in self._lines.keys() - found.keys():
            self._cut(self._lines[life])
        for life, line in found.items():
            known = self._lines.setdefault(life, line)
            known.record = line.record
            if known is line:
                self.spawn(self._watch(line))

    def _line_to(self, record: MemberRecord) -> _Line | None:
        if isinstance(record, InstanceRecord):
            name = record.instance_id
            return _Line(name, record, self.subjects.instance_calls(name))
        if record.kind != "attention":
            return None
        return _Line(record.service_id, record, self.subjects.attention_calls(record.service_id))

    def _cut(self, line: _Line) -> None:
        """Its watch ends when it next looks."""
        del self._lines[line.life]
        if line.writer is not None:
            line.writer.close()

    def _is_kept(self, line: _Line) -> bool:
        return self._lines.get(line.life) is line

    async def _watch(self, line: _Line) -> None:
        """As long as the store has it: one that was wrongly told to be over may be back."""
        was_open, is_told, pause_s = False, False, SEEN_AFTER_S
        url, name = line.record.http_url, line.name
        host, port = _address_of(url)
        while self._is_kept(line):
            began_s = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, line.writer = await asyncio.open_connection(host, port)
            except (OSError, ValueError) as exc:
                if was_open and await self._is_unserved(line):
                    log.info("process_ended", extra={"member": name})
                    self.tell(line.record)
                elif not was_open and not is_told:
                    is_told = True
                    facts = {"member": name, "url": url, "error": str(exc)}
                    log.warning("port_unreachable", extra=facts)
                was_open = False
                pause_s = min(max(2 * pause_s, self.retry_s), LONGEST_RETRY_S)
            else:
                was_open = True
                await self._wait_closed(line, reader, line.writer)
                was_short = asyncio.get_running_loop().time() - began_s < self.retry_s
                pause_s = min(2 * pause_s, self.retry_s) if was_short else SEEN_AFTER_S
            await asyncio.sleep(pause_s)

    async def _wait_closed(
        self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.open += 1
        try:
            if self._is_kept(line):
                await reader.read(1)
        except OSError:
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _is_unserved(self, line: _Line) -> bool:
        """Whether nobody serves its calls. One that is lost on the way to a dead process says nothing: NATS
        may not have seen its end. Where the bus itself is away nobody knows."""
        while self._is_kept(line):
            try:
                await self.bus.call(line.subject, AreYouThere(), Acknowledged, ANSWER_TIMEOUT_S)
            except NoResponder:
                return True
            except BusTimeout:
                continue
            except LamellaError:
                return False
            else:
                return False
        return False


def _address_of(url: str) -> tuple[str, int]:
    """What is none has port 0, to which nobody connects."""
    try:
        address = urlsplit(url)
        return address.hostname or "", address.port or 0
    except ValueError:
        return "", 0
