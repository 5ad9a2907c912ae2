"""The supervisor's own processes: started tied to it, started again when they die, ended in order.

A child is kept by one task. Until the mesh is up, a child that dies fails the launch; afterwards it is
started again after a pause that doubles, so a broken service neither spins nor is forgotten.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from common.errors import LauncherError
from services.launcher.embedded import last_words
from services.launcher.state_directory import ProcessIdentity, identify

log = logging.getLogger("lamella.supervisor")

TIED = Path(__file__).with_name("tied.py")
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
STEADY_S = 30.0
"""A child that lived this long starts again without delay."""

ChildState = Literal["starting", "running", "restarting", "stopping", "stopped"]


@dataclass(slots=True)
class Child:
    """One process of the mesh and how to run it. ``command`` is absolute. It starts at its ``turn``, which
    is over when it is ``settled``: ready, or ended for good."""

    service_id: str
    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log_file: Path
    state: ChildState = "starting"
    restarts: int = 0
    identity: ProcessIdentity | None = None
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _process: Process | None = None
    _is_wanted: bool = True
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int | None:
        return None if self.identity is None else self.identity.pid

    async def keep(self, on_change: Callable[[], None], has_launched: Callable[[], bool]) -> None:
        """Runs the process, again and again, until ``stop``. Raises LauncherError while launching."""
        pause_s = FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        try:
            await self.turn.wait()
            self.log_file.unlink(missing_ok=True)
            while self._is_wanted:
                started_s = loop.time()
                status = await self._run_once(on_change)
                if not self._is_wanted:
                    return
                if not has_launched():
                    raise LauncherError(
                        f"{self.service_id} ended with {status}:\n{last_words(self.log_file)}"
                    )
                self.state = "restarting"
                self.restarts += 1
                if loop.time() - started_s > STEADY_S:
                    pause_s = FIRST_PAUSE_S
                log.warning(
                    "process_died", extra={"id": self.service_id, "status": status, "pause_s": pause_s}
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self.state = "stopped"
            self.settled.set()
            self.ended.set()

    def retire(self) -> None:
        """When it ends it is not started again, and where it has not begun it never is."""
        self._is_wanted = False
        self._woken.set()
        self.turn.set()

    async def stop(self, grace_s: float) -> None:
        """Asks the process to end, kills it after ``grace_s``, and returns when it is gone."""
        self.ask_to_end()
        try:
            async with asyncio.timeout(grace_s):
                await self.ended.wait()
        except TimeoutError:
            log.warning("process_killed", extra={"id": self.service_id, "grace_s": grace_s})
            self._send(signal.SIGKILL)
            await self.ended.wait()

    def ask_to_end(self) -> None:
        self.retire()
        if self.ended.is_set():
            return
        if self.state != "stopping":  # asked a second time, a service ends without finishing what it has
            self.state = "stopping"
            self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process at once."""
        self.retire()
        self._send(signal.SIGKILL)

    async def _run_once(self, on_change: Callable[[], None]) -> int:
        with self._open_log() as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(TIED),
                str(os.getpid()),
                *self.command,
                env=dict(self.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C is for the supervisor, which ends the others in order.
                start_new_session=True,
            )
        self.identity = identify(self.service_id, self.role, self._process.pid)
        if self._is_wanted:
            self.state = "running"
        else:
            self._send(signal.SIGTERM)
        on_change()
        try:
            return await self._process.wait()
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            self.identity = None
            self._process = None
            on_change()

    def _open_log(self) -> BinaryIO:
        """A disk that takes nothing costs a service its log, and no more."""
        try:
            return self.log_file.open("ab")
        except OSError as exc:
            log.warning("log_unwritten", extra={"id": self.service_id, "error": str(exc)})
            return Path(os.devnull).open("ab")

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
