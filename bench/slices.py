"""A decode step of the sliced program against transformers' own forward: same weights, same batch, in turn.

``slices``: fp32 with torch's operators throughout. ``fp32`` and ``bf16``: as instances with that ``--dtype``
compute on a CPU without bf16 instructions, few rows and, where ``linears.compiled_rows`` says so, products
with compiled kernels; bf16 is the default.

    python bench/slices.py [--threads 1] [--context 192] [--rounds 9]
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.kv.blocks import blocks_for
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import SamplingParams
from common.model import kernels
from common.model.attention import LocalAttention
from common.model.default_model import default_model_directory
from common.model.precision import WeightForm
from common.model.program import load_program
from common.model.runner import ModelRunner
from common.steps import Draw, SequenceStep

CACHE = Path("~/.cache/lamella")
BLOCK_SIZE = 256
BATCHES = (1, 8, 32)
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


def runner_of(directory: Path, weights: WeightForm, blocks: int) -> ModelRunner:
    program = load_program(directory, "float32", torch.device("cpu"), CACHE.expanduser(), weights=weights)
    spec = program.spec
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_SIZE, 4)
    return ModelRunner(
        program,
        LocalAttention(KVPool(layout, blocks, torch.float32, torch.device("cpu")), program.attention_specs),
    )


def transformers_step(model: Any, batch: int, context: int) -> Callable[[], object]:
    """One token a sequence after ``context`` cached ones; the cache is copied outside the clock."""
    from transformers import DynamicCache

    cache = DynamicCache()
    model(torch.ones(batch, context, dtype=torch.int64), past_key_values=cache, use_cache=True)
    caches = [copy.deepcopy(cache)]

    def step() -> object:
        used = caches.pop()
        output = model(torch.ones(batch, 1, dtype=torch.int64), past_key_values=used, use_cache=True)
        token: torch.Tensor = output.logits[:, -1].argmax(-1)
        used.crop(-1)  # the new token
        caches.append(used)
        return token

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from transformers import AutoModelForCausalLM

    directory = default_model_directory(CACHE)
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    model.eval()
    blocks = max(BATCHES) * blocks_for(options.context + 1, BLOCK_SIZE)
    slices = runner_of(directory, "model", blocks)
    kernels.use_compiled(CACHE)
    fp32, bf16 = runner_of(directory, "model", blocks), runner_of(directory, "bf16", blocks)
    compiled = kernels.compiled()
    for batch in BATCHES:
        each = blocks_for(options.context + 1, BLOCK_SIZE)
        steps = [
            SequenceStep(
                (1,), options.context, tuple(range(row * each, (row + 1) * each)), Draw(GREEDY, (), ())
            )
            for row in range(batch)
        ]
        with torch.inference_mode():
            work: dict[str, Callable[[], object]] = {
                "transformers": transformers_step(model, batch, options.context),
                "slices": lambda steps=steps: slices.run(steps),  # type: ignore[misc]
                "fp32": lambda steps=steps: fp32.run(steps),  # type: ignore[misc]
                "bf16": lambda steps=steps: bf16.run(steps),  # type: ignore[misc]
            }
            taken: dict[str, list[float]] = {name: [] for name in work}
            for _ in range(options.rounds):
                for name, step in work.items():
                    kernels.use(compiled if name in ("fp32", "bf16") else None)
                    began_s = time.perf_counter()
                    step()
                    taken[name].append(time.perf_counter() - began_s)
        medians = {name: statistics.median(values) for name, values in taken.items()}
        print(
            f"batch {batch:2}: "
            + "  ".join(
                f"{name} {1e3 * value:6.1f} ms ({value / medians['transformers']:.2f}x)"
                for name, value in medians.items()
            )
        )


if __name__ == "__main__":
    main()
