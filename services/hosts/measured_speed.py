"""How fast an instance has measured itself to be."""

import msgspec

from common.performance import FittedTime


class MeasuredSpeed(msgspec.Struct, frozen=True, gc=False):
    """Of the instance's own chunks and steps, as ``LoadReport`` has it; None before the first."""

    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    chunk_time: FittedTime | None = None
    step_time: FittedTime | None = None
