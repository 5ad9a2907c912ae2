"""What a mixed instance computes next, where prompts and decodes both wait.

``prefill_first`` is vLLM's original rule (Vidur 4.5): prompts run as soon as they are there and decodes wait.
``chunked`` is mixed continuous batching (Splitwise II; Sarathi, Vidur 4.5): every pass takes the decodes, a
token each, and what is left of its tokens is a chunk of prompts. Under both, whoever waits grows older until
nobody comes before it, so none waits for ever.
"""

from common.config import MixedPolicy
from common.messages import Phase


def choose_pass(policy: MixedPolicy, decodes_waited_s: float, max_wait_s: float) -> tuple[Phase, ...]:
    """Whose work the next run of the model takes. ``decodes_waited_s``: for how long the decode step has been
    ready. It waits ``max_wait_s`` and one chunk at the longest."""
    if policy == "chunked":
        return ("prefill", "decode")
    return ("decode",) if decodes_waited_s >= max_wait_s else ("prefill",)


def prompt_tokens_beside(policy: MixedPolicy, chunk_tokens: int, decoding: int) -> int:
    """Of the next chunk, at least 1, where so many sequences are decoded: with these it fills the pass."""
    return chunk_tokens if policy == "prefill_first" else max(1, chunk_tokens - decoding)
