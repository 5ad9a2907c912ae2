"""What instances tell of how long their chunks and steps take: as a profile of theirs has it (``lamella
profile``), fitted to their model of performance in place of a machine."""

from common.laws import chunk_features, pairs_of, step_features
from scheduler.policy.fitting import LinearFit
from services.hosts.measured_speed import MeasuredSpeed
from services.simulator.performance.interface import PerformanceModel
from services.simulator.shape import PassShape

REPEATS = 12
"""How often a case is shown to the fit: enough for what it believed before to count for nothing."""
CHUNK_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
BATCH_SHARES = (0.02, 0.1, 0.3, 0.6, 1.0)
CONTEXTS = (128, 512, 1024, 2048)


def measured_speed_of(
    performance: PerformanceModel, chunk_tokens: int, max_batch: int, stages: int = 1
) -> MeasuredSpeed:
    """Of an instance that computes chunks of at most so many tokens, one in each stage, and so many sequences
    at once."""
    chunk_fit, step_fit = LinearFit(len(chunk_features(1, 0))), LinearFit(len(step_features(1, 1)))
    chunks = sorted({max(1, round(share * chunk_tokens)) for share in CHUNK_SHARES})
    batches = sorted({max(1, round(share * max_batch)) for share in BATCH_SHARES})
    for _ in range(REPEATS):
        for tokens in chunks:
            for before in (0, chunk_tokens):
                features = chunk_features(tokens, pairs_of(before, tokens))
                chunk_fit.observe(features, performance.pass_s(PassShape(((before, tokens),))))
        for batch in batches:
            for context in CONTEXTS:
                seconds = performance.pass_s(PassShape((), batch, batch * context))
                step_fit.observe(step_features(batch, batch * context), seconds)
    full_s = performance.pass_s(PassShape(((0, chunk_tokens),)))
    return MeasuredSpeed(
        prefill_tokens_per_s=stages * chunk_tokens / full_s if full_s > 0 else None,
        chunk_time=chunk_fit.fitted,
        step_time=step_fit.fitted,
    )
