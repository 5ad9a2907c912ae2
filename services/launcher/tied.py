"""Becomes another program, tied to its parent: ``python -I -S tied.py PARENT_PID PROGRAM ARGUMENT ...``.

The kernel sends SIGTERM when the parent dies, however it dies, so a killed launcher leaves nothing running.
A program of its own, since the setting survives exec and needs no code between fork and exec of the parent.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tie_to(parent_pid: int) -> None:
    """This process, which that one has started, ends when that dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:
            # It died before the line above.
            sys.exit(0)


def main() -> None:
    parent_pid, program = int(sys.argv[1]), sys.argv[2:]
    tie_to(parent_pid)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
