"""What the prefill room computes: a planned chunk as one forward pass."""

from collections.abc import Sequence

from common.messages import SampledToken
from common.steps import Draw, Runner, SequenceStep
from prefill.events import ChunkSlice


def run_chunk(runner: Runner, slices: Sequence[ChunkSlice]) -> tuple[SampledToken | None, ...]:
    """Runs on the engine's thread. A token for each slice that ends its prompt, else None."""
    return tuple(runner.run([_as_step(piece) for piece in slices]))


def _as_step(piece: ChunkSlice) -> SequenceStep:
    request = piece.request
    token_ids = (*request.prompt_ids, *request.output_ids)[piece.start : piece.start + piece.tokens]
    draw = Draw(request.sampling, request.prompt_ids, request.output_ids) if piece.is_last else None
    return SequenceStep(token_ids, piece.start, piece.block_table, draw)
