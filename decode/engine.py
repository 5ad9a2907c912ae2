"""What the decode room computes: one token for every sequence of the batch, as one forward pass."""

from collections.abc import Sequence

from common.ids import sequence_key
from common.messages import SampledToken
from common.steps import Draw, Runner, SequenceStep
from common.timeline import timeline
from common.timeline_events import DECODE_STEP
from decode.events import StepRow


def run_step(runner: Runner, rows: Sequence[StepRow]) -> tuple[SampledToken | None, ...]:
    """Runs on the engine's thread. One token per row, in order; None where the row's KV was lost."""
    began_ns = timeline.begin()
    tokens = tuple(runner.run([as_step(row) for row in rows]))
    if began_ns:
        context_tokens = sum(row.position for row in rows)
        ids = " ".join(row.request.request_id for row in rows)
        timeline.end(began_ns, DECODE_STEP, len(rows), context_tokens, requests=ids)
    return tokens


def as_step(row: StepRow) -> SequenceStep:
    request = row.request
    return SequenceStep(
        token_ids=(row.output_ids[-1],),
        start=row.position,
        block_table=row.block_table,
        draw=Draw(request.sampling, request.prompt_ids, row.output_ids),
        key=sequence_key(request.request_id),
    )
