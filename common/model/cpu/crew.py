"""Two cores at one kernel: the engine's thread and one helper take parts of a job as they are free.

Whoever comes takes the next part, so a helper that the system does not run costs nothing, and nobody waits at
a barrier for more than one part. The helper looks for work for a moment after the last job, then sleeps.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from common.model.cpu.jobs import ARGUMENTS, JOB_WORDS
from common.model.cpu.library import KernelLibrary

CREW = 2
"""Who calls, and a helper."""
PATIENCE = 500
"""Looks in vain before the helper sleeps, the later ones offering its core to others: some 100 µs, longer
than the pause between two linears."""


class Crew:
    """Of one thread, which alone calls ``run``."""

    def __init__(self, kernels: KernelLibrary) -> None:
        self._kernels = kernels
        self._words: Any = (ctypes.c_int64 * JOB_WORDS)()
        self._job = ctypes.addressof(self._words)
        self._wanted = threading.Event()
        self._is_awake = False
        self._helper: threading.Thread | None = None

    def run(self, arguments: Sequence[int], parts: int, keep: object = None) -> None:
        """``arguments``: the job's kind, then the kernel's. Returns when it is done. A thread with one core
        does not cut it into ``parts``. ``keep``: whatever the addresses among them belong to."""
        self._words[ARGUMENTS : ARGUMENTS + len(arguments)] = arguments
        is_shared = torch.get_num_threads() > 1
        if is_shared and not self._is_awake:
            self._wake()
        self._kernels.run_job(self._job, parts if is_shared else 1)

    def _wake(self) -> None:
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="helper", daemon=True)
            self._helper.start()
        self._is_awake = True
        self._wanted.set()

    def _help(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            self._kernels.help_until_idle(self._job, PATIENCE)
            self._is_awake = False


_own = threading.local()


def own_crew(kernels: KernelLibrary) -> Crew:
    """The calling thread's."""
    try:
        return _own.crew  # type: ignore[no-any-return]
    except AttributeError:
        crew = _own.crew = Crew(kernels)
        return crew
