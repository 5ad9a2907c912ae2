"""The linear law of DistServe (appendix A) and Aladdin (section 3): what a pass costs is a sum of what its
tokens, its attention pairs, its sequences and their context cost, and of a fixed part; and of what a prompt
that ends in it costs its process."""

from dataclasses import dataclass

from common.laws import pairs_of
from services.simulator.shape import PassShape


@dataclass(frozen=True, slots=True)
class LinearPerformance:
    """Seconds each. A pass of both kinds pays the larger fixed part once."""

    prefill_s: float = 0.0
    per_prompt_token_s: float = 0.0
    per_pair_s: float = 0.0
    step_s: float = 0.0
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0
    per_ended_prompt_s: float = 0.0

    @property
    def stages(self) -> int:
        return 1

    def pass_s(self, shape: PassShape) -> float:
        seconds, fixed_s = self.per_ended_prompt_s * shape.ended, 0.0
        for start, tokens in shape.chunks:
            seconds += self.per_prompt_token_s * tokens + self.per_pair_s * pairs_of(start, tokens)
            fixed_s = self.prefill_s
        if shape.sequences:
            fixed_s = max(fixed_s, self.step_s)
            seconds += self.per_sequence_s * shape.sequences + self.per_context_token_s * shape.context_tokens
        return seconds + fixed_s

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        # ``attended_tokens``, here without the call: reports and events ask how far runs have come.
        attended = steps * context_tokens + sequences * steps * (steps - 1) // 2
        context_s = self.per_context_token_s * attended
        return steps * (self.step_s + self.per_sequence_s * sequences) + context_s

    def model_s(self, sequences: int) -> float:
        return self.step_s + self.per_sequence_s * sequences

    def attention_s(self, sequences: int, context_tokens: int) -> float:
        return self.per_context_token_s * context_tokens
