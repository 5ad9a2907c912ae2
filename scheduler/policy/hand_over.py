"""How a prompt's KV goes to its decode instance: layer by layer while it is computed, or in one piece after.

Splitwise 4.4: layer-wise transfer hides the transfer behind the prompt's computation, at the price of one
synchronisation a layer; for small prompts serialized transfer is cheaper (there, below 512 tokens on H100).
"""

from collections.abc import Mapping

LEAST_REPORT_BYTES = 2 << 20
"""KV that is worth a message and a transfer of its own while a prompt is computed."""


def is_layerwise(prompt_tokens: int, output_tokens: int, min_tokens: int) -> bool:
    """Whether a prompt's KV is handed over while it is computed. ``output_tokens``: the most that are still
    to be drawn; a sequence that ends with its first needs no hand-over."""
    return prompt_tokens >= min_tokens and output_tokens > 1


def layers_per_report(layer_bytes: int) -> int:
    """After how many layers each the engine tells that KV is there; a layer of what is being computed has
    ``layer_bytes``. Those of large models are told of one by one, as in Splitwise."""
    return -(-LEAST_REPORT_BYTES // layer_bytes)


def layerwise_threshold(seconds: Mapping[int, tuple[float, float]]) -> int | None:
    """From how many tokens on prompts are best handed over layer by layer; None: none of those measured.

    ``seconds``: by a prompt's tokens, what it took (serialized, layer by layer). Both are measured with
    noise, so it is not where the one first beats the other, but what costs all of the lengths least, each
    counted in shares of its own time. Raises ValueError without any.
    """
    if not seconds:
        raise ValueError("no hand-over was measured")

    def cost(threshold: int) -> float:
        shares = [
            (layerwise / serialized if tokens >= threshold else 1.0)
            for tokens, (serialized, layerwise) in seconds.items()
        ]
        return sum(shares, 0.0)

    never = max(seconds) + 1
    best = min((*seconds, never), key=lambda threshold: (cost(threshold), -threshold))
    return None if best == never else best
