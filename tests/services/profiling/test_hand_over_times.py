"""Hand-overs measured between the instances of real meshes, with the emulated engine."""

from contextlib import nullcontext

from common.config import Config, EmulationConfig, InstanceConfig, TransferConfig
from services.profiling.hand_over_times import PROMPT_TOKENS, measure_hand_overs

BANDWIDTH = 1e3
"""Bytes per second; the emulated engine's KV has two for each token."""


def test_over_a_slow_link_long_prompts_are_best_handed_over_while_they_are_computed() -> None:
    """Of 512 tokens: they are computed in a second, and their KV is on its way for as long."""
    config = Config(
        instance=InstanceConfig(engine="emulated", block_size=16, chunk_tokens=64),
        emulation=EmulationConfig(prefill_per_token_s=0.002, total_blocks=1024),
        transfer=TransferConfig(emulated_bandwidth_bytes_per_s=BANDWIDTH),
    )
    seen: list[int] = []
    times = measure_hand_overs(config, 600, 1, lambda stage: nullcontext(), seen.append)
    lengths = [tokens for tokens in PROMPT_TOKENS if tokens < 600]
    assert [tokens for tokens, *_ in times.until_second_s] == lengths
    assert seen == list(range(1, 2 * len(lengths) + 1))
    _, serialized, layerwise = times.until_second_s[-1]
    assert layerwise < serialized
    assert times.layerwise_min_tokens is not None
    assert times.link == f"auto, tcp, {BANDWIDTH:g} bytes/s"
