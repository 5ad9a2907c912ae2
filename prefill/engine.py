"""What the prefill room computes: a planned chunk, alone in a forward pass or beside the decodes' step."""

from collections.abc import Sequence

from common.shared_engine import EngineWork
from common.steps import Draw, LayerReports, SequenceStep
from common.timeline import timeline
from common.timeline_events import PREFILL_STEP
from prefill.events import ChunkSlice
from prefill.speed import load_of


def chunk_work(slices: Sequence[ChunkSlice], reports: LayerReports | None = None) -> EngineWork:
    """It draws a token for each slice that ends its prompt, else None."""

    def note(began_ns: int) -> None:
        chunk_tokens = sum(piece.tokens for piece in slices)
        ids = " ".join(piece.request.request_id for piece in slices)
        timeline.end(began_ns, PREFILL_STEP, len(slices), chunk_tokens, requests=ids)

    return EngineWork(lambda: [_as_step(piece) for piece in slices], note, load_of(slices), reports)


def _as_step(piece: ChunkSlice) -> SequenceStep:
    request = piece.request
    token_ids = (*request.prompt_ids, *request.output_ids)[piece.start : piece.start + piece.tokens]
    draw = Draw(request.sampling, request.prompt_ids, request.output_ids) if piece.is_last else None
    return SequenceStep(token_ids, piece.start, piece.block_table, draw)
