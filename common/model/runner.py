"""The model as a Runner: a flat ragged batch through the program, and the batch's draws."""

from collections.abc import Callable, Generator, Sequence
from itertools import islice

import torch

from common.messages import SampledToken
from common.model.interface import SequenceChunk, StepAttention
from common.model.padding import own_rows
from common.model.program import ModelProgram
from common.model.sampling import SamplingRow, sample
from common.model.step_graphs import StepGraphs
from common.steps import LayerReports, SequenceStep
from common.timeline import timeline
from common.timeline_events import SAMPLE

MOST_OWN_HEADS = 32
"""More tokens are rarely drawn at once, and the output matrix is read for each number."""
LONG_STEP_TOKENS = 128
"""A step of so many tokens takes long enough for a neighbour to begin or end its own."""


class ModelRunner:
    """One step at a time, on whichever engine threads: the attention's step state is shared between calls.

    ``share_cores`` is called between the slices of a long step. ``lost_chunks`` says, after a step, which of
    its sequences have lost their KV; attention in this process loses none. ``graphs`` compute those steps
    that they take, over the same pool.
    """

    def __init__(
        self,
        program: ModelProgram,
        attention: StepAttention,
        share_cores: Callable[[], None] | None = None,
        lost_chunks: Callable[[], list[bool]] | None = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._program = program
        self._attention = attention
        self._eos_token_ids = program.spec.eos_token_ids
        self._share_cores = share_cores
        self._lost_chunks = lost_chunks
        self._graphs = graphs

    def over(self, attention: StepAttention, lost_chunks: Callable[[], list[bool]]) -> "ModelRunner":
        """The same model over other attention."""
        return ModelRunner(self._program, attention, self._share_cores, lost_chunks)

    @property
    def program(self) -> ModelProgram:
        return self._program

    @torch.inference_mode()
    def run(
        self, batch: Sequence[SequenceStep], reports: LayerReports | None = None
    ) -> list[SampledToken | None]:
        if self._graphs is not None and reports is None:
            token_ids, _, output_rows = _flat(batch)
            replayed = self._graphs.logits(token_ids, _chunks_of(batch), output_rows)
            if replayed is not None:
                return self._draw(batch, replayed)
        course = self.course(batch)
        tokens = sum(len(step.token_ids) for step in batch)
        share_cores = self._share_cores if tokens >= LONG_STEP_TOKENS else None
        while True:
            if share_cores is not None:
                share_cores()
            try:
                layer = next(course)
            except StopIteration as end:
                drawn: list[SampledToken | None] = end.value
                return drawn
            if reports is not None and reports.are_due(layer + 1):
                self._wait_written()
                reports.tell(layer + 1)

    def is_settled(self, batch: Sequence[SequenceStep]) -> bool:
        """Whether such a pass is computed the same way from now on."""
        return self._graphs is None or self._graphs.is_settled(_chunks_of(batch))

    @torch.inference_mode()
    def make_kernels(self, most_rows: int, most_draws: int, block_table: tuple[int, ...], room: int) -> None:
        """Those that products of up to so many rows need, where each number of rows has its own: by the first
        two slices, which have all products that layers have, and by the last one, of tokens that are drawn.
        For as many threads as the caller's has. In blocks which nobody holds, of ``room`` tokens."""
        program = self._program
        counts = own_rows(most_rows, program.dtype, program.device, program.compiled_rows)
        none = torch.empty(0, dtype=torch.int64)
        for rows in counts:
            begins = range(0, rows, room)
            self._attention.begin(
                [SequenceChunk(block_table, 0, min(room, rows - begin)) for begin in begins]
            )
            ones, positions = torch.ones(rows, dtype=torch.int64), torch.arange(rows) % room
            course = program.course(ones, positions, self._attention, none)
            for _ in islice(course, 2):
                pass
            course.close()
            self._attention.give_up()
        heads = [*range(1, min(most_draws, MOST_OWN_HEADS) + 1)] if counts else []
        heads = [rows for rows in heads if rows > program.compiled_rows]
        if heads:
            self._attention.begin([SequenceChunk(block_table, 0, 1)])
            program.make_heads(heads, self._attention)
            self._attention.give_up()

    def _wait_written(self) -> None:
        """A slice ends with its layer's K and V on their way into the pool: a device may not be done yet."""
        if self._program.device.type == "cuda":
            torch.cuda.current_stream(self._program.device).synchronize()

    def course(
        self, batch: Sequence[SequenceStep], replicas: Sequence[ModelProgram] = (), lane: int = 0
    ) -> Generator[int, None, list[SampledToken | None]]:
        """``run`` in parts: yields the layer whose attention is awaited. For ``replicas``, and ``lane``, the
        batch's number among those under way, see ``ModelProgram.course``."""
        device = replicas[0].device if replicas else self._program.device
        token_ids, positions, output_rows = _flat(batch)
        try:
            self._attention.begin(_chunks_of(batch))
            logits = yield from self._program.course(
                torch.tensor(token_ids, dtype=torch.int64, device=device),
                torch.tensor(positions, dtype=torch.int64, device=device),
                self._attention,
                torch.tensor(output_rows, dtype=torch.int64, device=device),
                replicas,
                lane,
            )
        except Exception:
            self._attention.give_up()
            raise
        return self._draw(batch, logits)

    def _draw(self, batch: Sequence[SequenceStep], logits: torch.Tensor) -> list[SampledToken | None]:
        """``logits``: a row for each step that draws."""
        draws = [step.draw for step in batch if step.draw is not None]
        rows = [
            SamplingRow(draw.sampling, draw.prompt_ids, draw.output_ids, self._eos_token_ids)
            for draw in draws
        ]
        began_ns = timeline.begin()
        drawn = iter(sample(logits, rows) if rows else [])
        if began_ns:
            timeline.end(began_ns, SAMPLE, len(rows))
        tokens = [None if step.draw is None else next(drawn) for step in batch]
        if self._lost_chunks is None:
            return tokens
        lost = self._lost_chunks()
        return [None if is_lost else token for token, is_lost in zip(tokens, lost, strict=True)]


def _flat(batch: Sequence[SequenceStep]) -> tuple[list[int], list[int], list[int]]:
    """Token ids and positions of all, and which of them draw."""
    token_ids: list[int] = []
    positions: list[int] = []
    output_rows: list[int] = []
    for step in batch:
        token_ids.extend(step.token_ids)
        positions.extend(range(step.start, step.start + len(step.token_ids)))
        if step.draw is not None:
            output_rows.append(len(token_ids) - 1)
    return token_ids, positions, output_rows


def _chunks_of(batch: Sequence[SequenceStep]) -> list[SequenceChunk]:
    return [SequenceChunk(step.block_table, step.start, len(step.token_ids), step.key) for step in batch]
