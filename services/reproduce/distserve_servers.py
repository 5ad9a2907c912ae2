"""DistServe's and vLLM's servers as DistServe's simulator has them (``bench/distserve_*.toml``)."""

from dataclasses import dataclass
from typing import Any

from services.reproduce.data import (
    SHAREGPT_TRACE,
    DataFiles,
    Lengths,
    PublishedLength,
    PublishedLengths,
    described,
    lengths_of,
)
from services.reproduce.running import NOBODY_IS_TURNED_AWAY
from services.simulator.performance.distserve import DistServeModel, read_distserve
from services.simulator.shape import PassShape

CONSTANTS = {
    "vllm": "distserve/profiler-a100-80g.vllm.json",
    "distserve": "distserve/profiler-a100-80g.distserve.json",
}
LONGEST = 2048
"""Of a prompt with its output: OPT's context."""
SHAREGPT_LENGTHS = PublishedLengths("Figure 7", PublishedLength(755.5), PublishedLength(200.3), LONGEST)
NEAR_PAPER = "distserve/workload_B_n1000_seed0.csv.gz"


@dataclass(frozen=True, slots=True)
class Server:
    """One instance of ``tensor`` GPUs for both phases, or one for each (``tensor``, ``decode_tensor``)."""

    name: str
    model: str
    tensor: int
    decode_tensor: int | None = None

    @property
    def gpus(self) -> int:
        return self.tensor + (self.decode_tensor or 0)

    def __str__(self) -> str:
        if self.decode_tensor is None:
            return f"{self.name}, {self.tensor} GPU"
        return f"{self.name}, {self.tensor} + {self.decode_tensor} GPU"


def tree_of(server: Server, files: DataFiles) -> dict[str, Any]:
    """All prompts that wait go into one pass; vLLM's decodes wait for prompts; KV moves in no time and no
    memory is counted."""
    is_coupled = server.decode_tensor is None
    path = str(files.require(CONSTANTS["vllm" if is_coupled else "distserve"]).resolve())

    def pool(role: str, tensor: int) -> dict[str, Any]:
        model = f"facebook/{server.model}"
        performance = {"kind": "distserve", "path": path, "model": model, "is_ray_counted": True}
        return {
            "name": role,
            "role": role,
            "count": 1,
            "devices": tensor,
            "kv_tokens": 1_000_000,
            "performance": performance,
        }

    pools = [pool("mixed", server.tensor)]
    if server.decode_tensor is not None:
        pools = [pool("prefill", server.tensor), pool("decode", server.decode_tensor)]
    return {
        "cluster": {"model": server.model, "hop_s": 0.0, "link_bytes_per_s": 1e15},
        "transfer": {"layerwise_min_tokens": 1_000_000, "pull_share": 1.0},
        "instance": {
            "block_size": 16,
            "chunk_tokens": 66_144,
            "prefill_batching": "saturation",
            "mixed_policy": "prefill_first",
            "mixed_max_wait_s": 86_400.0,
            "scheduling_window": 10_000,
            "max_waiting_requests": 1_000_000,
            "max_decode_batch": 10_000,
        },
        "scheduler": dict(NOBODY_IS_TURNED_AWAY),
        "pool": pools,
    }


def lengths_near_paper(files: DataFiles, count: int) -> Lengths:
    """With means near those that the paper prints; its own sample is not published."""
    return lengths_of(files, NEAR_PAPER, SHAREGPT_LENGTHS, count)


def real_lengths(files: DataFiles, count: int) -> Lengths:
    """Of ShareGPT conversations, a request each that fits OPT's context."""
    found = lengths_of(files, SHAREGPT_TRACE, SHAREGPT_LENGTHS, 2 * count)
    fitting = [each for each in found.pairs if each.prompt_tokens + each.output_tokens < LONGEST]
    return described(fitting[:count], f"lengths drawn from {SHAREGPT_TRACE}, under {LONGEST:,} tokens in all")


def model_of(server: Server, files: DataFiles) -> DistServeModel:
    """Of the instance that computes prompts."""
    kind = "vllm" if server.decode_tensor is None else "distserve"
    constants = read_distserve(files.require(CONSTANTS[kind]), f"facebook/{server.model}", server.tensor)
    return DistServeModel(constants, is_ray_counted=True)


def longest_prompt(server: Server, files: DataFiles, ttft_s: float) -> int:
    """That alone has its first token in time."""
    model = model_of(server, files)
    tokens = range(1, LONGEST + 1)
    in_time = [each for each in tokens if model.pass_s(PassShape(((0, each),))) <= ttft_s]
    return max(in_time, default=0)
