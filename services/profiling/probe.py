"""How fast this machine is meanwhile: what some layers of a model take on one core, again and again.

A virtual machine computes at another pace every few minutes, by what its neighbours do (40 % within an hour
was measured, of all passes alike), and for a second or two at a time. Whoever compares times of two hours
needs the pace of each, all through: a look before and one after missed slow seconds, or took one for all.
"""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, reduce
from itertools import cycle, islice
from typing import TYPE_CHECKING, NamedTuple

from common.config import Config
from common.model.precision import precision_of
from common.spec import ElementType

if TYPE_CHECKING:
    from torch import Tensor

WIDTH, MIDDLE, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
LAYERS = 18
"""Of SmolLM2-135M's shape, 120 MiB in bf16: more than caches of a core hold."""
LEAD, TIMED = 6, 2
"""Layers, of which each comes again when others have taken its room in the caches. The first ones take longer
on a core that slept, and on one from which an engine was taken: beside two engines that decode a look took
19 % longer than alone after one layer, 15 after three, 11 after six, where the engines' passes took 5 to 10 %
longer beside one another (measured on a Zen 5)."""
ROWS = (8, 64)
"""As of a decode step and of a chunk. Products alone, of 8 rows and of 256, changed a third to two thirds as
much as passes did from minute to minute (measured on a Zen 4): what is between products changes most."""
EVERY_S = 0.5
"""At the most: with ``MOST_OF_A_CORE`` a look of 15 to 40 ms, as on a core of 2023's servers, comes every
0.75 to 2 s."""
PAUSE_S = 0.1
"""Between looks beside which nothing is computed: they wake a core from its sleep, too."""
MOST_OF_A_CORE = 0.02
"""Of slower ones, by looking less often: what is watched wants all cores. In bf16, looks took 39 % of a core
that has no such products, and a mesh beside them served LPLD's first tokens in 190 ms, not 90 (measured)."""


def looking_s(looks_s: Sequence[float]) -> float:
    """Seconds of a core that these looks took, about: layers ahead of those that were timed as if they took
    as long."""
    return (LEAD + TIMED) / TIMED * sum(looks_s)


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
        self._layers: Sequence[_Layer] = ()
        if config.instance.engine == "model" and config.model.device == "cpu":
            self._inputs, self._layers = _made(precision_of(config.model).compute)

    @contextmanager
    def watch(self) -> Iterator[Pieces]:
        """While it lasts: at least one piece, in a thread of its own. That others keep it from a core is not
        counted."""
        pieces = Pieces()
        if not self._layers:
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

    def looks(self, count: int) -> list[float]:
        """Seconds of so many, one after another. Empty where there is nothing to look at. In a thread of its
        own: torch's have one core each from then on."""
        if not self._layers:
            return []
        import torch

        torch.set_num_threads(1)
        around, taken_s = cycle(self._layers), []
        with torch.inference_mode():
            for _ in range(count):
                time.sleep(PAUSE_S)
                taken_s.append(self._timed(around))
        return taken_s

    def _look(self, pieces: Pieces, ended: threading.Event) -> None:
        try:
            self._look_until(pieces, ended)
        except Exception as exc:  # raised where it is watched
            pieces.error = exc

    def _look_until(self, pieces: Pieces, ended: threading.Event) -> None:
        import torch

        torch.set_num_threads(1)
        around = cycle(self._layers)
        is_over = False
        with torch.inference_mode():
            every_s = math.inf
            while not is_over:
                woke_s = time.thread_time()
                pieces.taken_s.append(self._timed(around))
                # By the shortest look, or slow seconds would be looked at less often than others.
                every_s = min(every_s, max(EVERY_S, (time.thread_time() - woke_s) / MOST_OF_A_CORE))
                is_over = ended.wait(every_s)
        pieces.processor_s = time.thread_time()

    def _timed(self, around: Iterator["_Layer"]) -> float:
        """Seconds of the processor."""
        self._compute(around, LEAD)
        began_s = time.thread_time()
        self._compute(around, TIMED)
        return time.thread_time() - began_s

    def _compute(self, around: Iterator["_Layer"], each: int) -> None:
        for x in self._inputs:
            reduce(_through, islice(around, each), x)


class _Layer(NamedTuple):
    """Weights, [out, in] each."""

    norm: "Tensor"
    q: "Tensor"
    kv: "Tensor"
    o: "Tensor"
    gate_up: "Tensor"
    down: "Tensor"


def _through(x: "Tensor", layer: _Layer) -> "Tensor":
    """``x`` [rows, WIDTH], as one prompt's chunk."""
    from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

    normed = rms_norm(x, (WIDTH,), layer.norm, 1e-5)
    q = linear(normed, layer.q).view(1, -1, HEADS, HEAD_DIM).transpose(1, 2)
    kv = linear(normed, layer.kv).view(1, -1, 2 * KV_HEADS, HEAD_DIM).transpose(1, 2)
    k, v = kv[:, :KV_HEADS], kv[:, KV_HEADS:]
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + linear(attended.transpose(1, 2).reshape(-1, WIDTH), layer.o)
    both = linear(rms_norm(x, (WIDTH,), layer.norm, 1e-5), layer.gate_up)
    return x + linear(silu(both[:, :MIDDLE]) * both[:, MIDDLE:], layer.down)


@cache
def _made(dtype: ElementType) -> tuple[Sequence["Tensor"], Sequence[_Layer]]:
    """Inputs and layers, once for all that look. As the model computes: a processor without bf16
    products takes eight times as long over bf16 as over fp32."""
    import torch

    made = torch.Generator().manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=made) / math.sqrt(shape[-1])).to(kind)

    norm = torch.ones(WIDTH, dtype=kind)
    kv_width = 2 * KV_HEADS * HEAD_DIM
    shapes = ((WIDTH, WIDTH), (kv_width, WIDTH), (WIDTH, WIDTH), (2 * MIDDLE, WIDTH), (WIDTH, MIDDLE))
    layers = tuple(_Layer(norm, *(random(*shape) for shape in shapes)) for _ in range(LAYERS))
    return tuple(random(rows, WIDTH) for rows in ROWS), layers
