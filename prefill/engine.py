"""What the prefill room computes: a planned chunk as one forward pass."""

from collections.abc import Sequence

from common.messages import SampledToken
from common.steps import Draw, LayerReports, Runner, SequenceStep
from common.timeline import timeline
from common.timeline_events import PREFILL_STEP
from prefill.events import ChunkSlice


def run_chunk(
    runner: Runner, slices: Sequence[ChunkSlice], reports: LayerReports | None = None
) -> tuple[SampledToken | None, ...]:
    """Runs on the engine's thread. A token for each slice that ends its prompt, else None."""
    began_ns = timeline.begin()
    tokens = tuple(runner.run([_as_step(piece) for piece in slices], reports))
    if began_ns:
        chunk_tokens = sum(piece.tokens for piece in slices)
        ids = " ".join(piece.request.request_id for piece in slices)
        timeline.end(began_ns, PREFILL_STEP, len(slices), chunk_tokens, requests=ids)
    return tokens


def _as_step(piece: ChunkSlice) -> SequenceStep:
    request = piece.request
    token_ids = (*request.prompt_ids, *request.output_ids)[piece.start : piece.start + piece.tokens]
    draw = Draw(request.sampling, request.prompt_ids, request.output_ids) if piece.is_last else None
    return SequenceStep(token_ids, piece.start, piece.block_table, draw)
