"""What the decode room computes: one token for every sequence of the batch, as one forward pass."""

from collections.abc import Sequence

from common.messages import SampledToken
from common.steps import Draw, Runner, SequenceStep
from decode.events import StepRow


def run_step(runner: Runner, rows: Sequence[StepRow]) -> tuple[SampledToken, ...]:
    """Runs on the engine's thread. One token per row, in order."""
    tokens = runner.run([_as_step(row) for row in rows])
    return tuple(token for token in tokens if token is not None)


def _as_step(row: StepRow) -> SequenceStep:
    request = row.request
    return SequenceStep(
        token_ids=(row.output_ids[-1],),
        start=row.position,
        block_table=row.block_table,
        draw=Draw(request.sampling, request.prompt_ids, row.output_ids),
    )
