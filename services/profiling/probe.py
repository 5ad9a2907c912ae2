"""How fast this machine is meanwhile: what a fixed piece of work takes on one core, again and again.

A virtual machine computes at another pace every few minutes, by what its neighbours do (40 % within an hour
was measured, of all passes alike), and for a second or two at a time. Whoever compares times of two hours
needs the pace of each, all through: a look before and one after missed slow seconds, or took one for all.
"""

import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, islice
from typing import TYPE_CHECKING

from common.config import Config
from common.model.precision import precision_of
from common.spec import ElementType

if TYPE_CHECKING:
    from torch import Tensor

SIDE, MATRICES = 1024, 60
"""120 MiB of weights in bf16, as those of a small model: more than caches of a core hold."""
LEAD, TIMED = 2, 4
"""Matrices, of which each comes again when others have taken its room in the caches. A core that slept takes
a tenth longer over the first ones (measured) than one that computed something else."""
ROWS = (8, 256)
"""As in a decode step, which waits for memory, and in a chunk of a prompt, which computes."""
EVERY_S = 0.5
"""Some 5 ms each, on a core of 2023's servers: 1 % of it."""
MOST_OF_A_CORE = 0.02
"""Of slower ones, by looking less often: what is watched wants all cores. In bf16, looks took 39 % of a core
that has no such products, and a mesh beside them served LPLD's first tokens in 190 ms, not 90 (measured)."""


@dataclass(slots=True)
class Pieces:
    """``taken_s``: of the processor, each piece. ``processor_s``: all that looking took of it, at the end.
    ``error``: that ended it early."""

    taken_s: list[float] = field(default_factory=list)
    processor_s: float = 0.0
    error: Exception | None = None


class Probe:
    """Of the machine's processor, where that computes the model of ``config``: of anything else it says
    nothing."""

    def __init__(self, config: Config) -> None:
        self._inputs: Sequence[Tensor] = ()
        self._matrices: Sequence[Tensor] = ()
        if config.instance.engine == "model" and config.model.device == "cpu":
            self._inputs, self._matrices = _made(precision_of(config.model).compute)

    @contextmanager
    def watch(self) -> Iterator[Pieces]:
        """While it lasts: at least one piece, in a thread of its own. That others keep it from a core is not
        counted."""
        pieces = Pieces()
        if not self._matrices:
            yield pieces
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._look, args=(pieces, ended), name="probe", daemon=True)
        thread.start()
        try:
            yield pieces
        finally:
            ended.set()
            thread.join()
        if pieces.error is not None:
            raise pieces.error

    def _look(self, pieces: Pieces, ended: threading.Event) -> None:
        try:
            self._look_until(pieces, ended)
        except Exception as exc:  # raised where it is watched
            pieces.error = exc

    def _look_until(self, pieces: Pieces, ended: threading.Event) -> None:
        import torch

        torch.set_num_threads(1)
        around = cycle(self._matrices)
        is_over = False
        with torch.inference_mode():
            every_s = math.inf
            while not is_over:
                woke_s = time.thread_time()
                self._compute(islice(around, LEAD))
                began_s = time.thread_time()
                self._compute(islice(around, TIMED))
                pieces.taken_s.append(time.thread_time() - began_s)
                # By the shortest look, or slow seconds would be looked at less often than others.
                every_s = min(every_s, max(EVERY_S, (time.thread_time() - woke_s) / MOST_OF_A_CORE))
                is_over = ended.wait(every_s)
        pieces.processor_s = time.thread_time()

    def _compute(self, matrices: Iterable["Tensor"]) -> None:
        from torch.nn.functional import linear

        for matrix in matrices:
            for rows in self._inputs:
                linear(rows, matrix)


@cache
def _made(dtype: ElementType) -> tuple[Sequence["Tensor"], Sequence["Tensor"]]:
    """Inputs and matrices, once for all that look. As the model computes: a processor without bf16
    products takes eight times as long over bf16 as over fp32."""
    import torch

    made = torch.Generator().manual_seed(0)
    inputs, matrices = (
        tuple(torch.randn(rows, SIDE, generator=made).to(getattr(torch, dtype)) for rows in sizes)
        for sizes in (ROWS, (SIDE,) * MATRICES)
    )
    return inputs, matrices
