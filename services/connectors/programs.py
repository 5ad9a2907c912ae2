"""Runs another program for its output, as connectors do with `docker` and `kubectl`."""

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, PIPE

from common.errors import LauncherError

MAX_SAID = 600
"""Characters of a failed program's last words; what went wrong stands at their end."""
END_TIMEOUT_S = 10.0


class ProgramFailed(LauncherError):
    """It cannot be run, or its status was not 0; what it said is in the message."""


async def output_of(*command: str, timeout_s: float) -> bytes:
    """What it wrote to its standard output. Raises ProgramFailed. Cancelled, it is ended by SIGTERM."""
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    except OSError as exc:
        raise ProgramFailed(f"{command[0]} cannot be run here ({exc.strerror})") from exc
    try:
        async with asyncio.timeout(timeout_s):
            output, said = await process.communicate()
    except TimeoutError as exc:
        raise ProgramFailed(f"{' '.join(command)}: not done after {timeout_s:g} s") from exc
    finally:
        await _end(process)
    if process.returncode:
        words = said.decode(errors="replace").strip()[-MAX_SAID:]
        raise ProgramFailed(f"{' '.join(command)} ended with {process.returncode}: {words}")
    return output


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
