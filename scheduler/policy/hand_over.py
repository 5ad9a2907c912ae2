"""How a prompt's KV goes to its decode instance: layer by layer while it is computed, or in one piece after.

Splitwise 4.4: layer-wise transfer hides the transfer behind the prompt's computation, at the price of one
synchronisation a layer; for small prompts serialized transfer is cheaper (there, below 512 tokens on H100).
"""


def is_layerwise(prompt_tokens: int, output_tokens: int, min_tokens: int) -> bool:
    """Whether a prompt's KV is handed over while it is computed. ``output_tokens``: the most that are still
    to be drawn; a sequence that ends with its first needs no hand-over."""
    return prompt_tokens >= min_tokens and output_tokens > 1
