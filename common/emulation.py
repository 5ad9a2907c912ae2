"""The emulated engine: steps that take the time a cost model says, and tokens drawn from a counter.

It lets the mesh be measured without a model, and large live experiments run on small machines. A token
depends on the prompt's length, the seed and the output position alone, so a sequence continued on another
instance, after any fault, gives the same tokens as one that was never disturbed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.config import EmulationConfig
from common.messages import SampledToken
from common.steps import Draw, LayerReports, SequenceStep
from common.timeline import timeline
from common.timeline_events import EMULATED


class EmulatedRunner:
    """A Runner without a model. ``wait`` is how time passes (a test passes its own)."""

    def __init__(self, config: EmulationConfig, wait: Callable[[float], None] = time.sleep) -> None:
        self._config = config
        self._wait = wait

    def run(
        self, batch: Sequence[SequenceStep], reports: LayerReports | None = None
    ) -> list[SampledToken | None]:
        """Its model has one layer."""
        began_ns = timeline.begin()
        self._wait(self.step_time_s(batch))
        if reports is not None and reports.are_due(1):
            reports.tell(1)
        if began_ns:
            timeline.end(began_ns, EMULATED, len(batch), sum(len(step.token_ids) for step in batch))
        return [None if step.draw is None else self._token(step.draw) for step in batch]

    def step_time_s(self, batch: Sequence[SequenceStep]) -> float:
        """Seconds of one forward pass; with both kinds of work in it, of fixed parts the larger one: weights
        are read once."""
        config = self._config
        decodes = [step for step in batch if _is_decode(step)]
        prompt_tokens = sum(len(step.token_ids) for step in batch) - len(decodes)
        context_tokens = sum(step.start + 1 for step in decodes)
        time_s = config.decode_per_sequence_s * len(decodes)
        time_s += config.decode_per_context_token_s * context_tokens
        time_s += config.prefill_per_token_s * prompt_tokens
        fixed_s = config.prefill_base_s if prompt_tokens else 0.0
        return time_s + max(fixed_s, config.decode_base_s if decodes else 0.0)

    def _token(self, draw: Draw) -> SampledToken:
        position = len(draw.prompt_ids) + len(draw.output_ids)
        mixed = (position * 0x9E3779B97F4A7C15 + draw.sampling.seed * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        return SampledToken((mixed >> 32) % self._config.vocab_size)


@dataclass(frozen=True, slots=True)
class EmulatedHostTier:
    """A host tier to and from which nothing needs to be copied: no runner looks at the bytes."""

    total_blocks: int
    block_bytes: int

    def copy_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> int:
        return len(host_blocks) * self.block_bytes

    def copy_in(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> int:
        return len(host_blocks) * self.block_bytes


def _is_decode(step: SequenceStep) -> bool:
    """One token after another drawn one; a chunk of one prompt token is prefill's."""
    return len(step.token_ids) == 1 and step.draw is not None and bool(step.draw.output_ids)
