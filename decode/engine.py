"""What the decode room computes: one token for every sequence of the batch, in one forward pass."""

from collections.abc import Sequence

from common.ids import sequence_key
from common.performance import PassLoad
from common.shared_engine import EngineWork
from common.steps import Draw, SequenceStep
from common.timeline import timeline
from common.timeline_events import DECODE_STEP
from decode.events import StepRow


def step_work(rows: Sequence[StepRow]) -> EngineWork:
    """It draws one token per row; None where the row's KV was lost."""

    def note(began_ns: int) -> None:
        context_tokens = sum(row.position for row in rows)
        ids = " ".join(row.request.request_id for row in rows)
        timeline.end(began_ns, DECODE_STEP, len(rows), context_tokens, requests=ids)

    return EngineWork(lambda: [as_step(row) for row in rows], note, load_of(rows))


def load_of(rows: Sequence[StepRow]) -> PassLoad:
    """What a step adds to a pass."""
    return PassLoad(sequences=len(rows), context_tokens=sum(row.position + 1 for row in rows))


def as_step(row: StepRow) -> SequenceStep:
    request = row.request
    return SequenceStep(
        token_ids=(row.output_ids[-1],),
        start=row.position,
        block_table=row.block_table,
        draw=Draw(request.sampling, request.prompt_ids, row.output_ids),
        key=sequence_key(request.request_id),
    )
