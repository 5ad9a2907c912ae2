"""Makes a model's conversion: capture, rewrite, cut, emit, and the check that nothing mixes tokens.

The self-check runs the converted program with attention replaced by a function of each token's own Q, K and
V: tokens together and one by one must then give the same logits. It catches whatever would make a token
depend on its batch (state outside the KV cache, scaling by the longest position), whatever the model.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.errors import ModelError
from common.model.cache import Manifest, save_conversion
from common.model.capture import CapturedModel, capture_model
from common.model.emit import emit
from common.model.experts import group_expert_linears
from common.model.mixing import mixing_operator
from common.model.program import TORCH_DTYPES, ModelProgram, load_converted
from common.model.report import save_report
from common.model.reporting import report_of
from common.model.rewrite import rewrite
from common.model.slices import cut, describe
from common.model.weights import WeightFiles
from common.spec import ElementType, read_spec, weight_files

CHECK_POSITIONS = (3, 0, 7, 1, 12, 5, 2, 9, 4)
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest difference allowed, relative to the largest logit."""


def convert(
    model_directory: Path, element_type: ElementType, target: Path, progress: Callable[[str], None]
) -> None:
    """Writes the conversion into the empty directory ``target``. Raises ModelError."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    spec = read_spec(model_directory)
    progress("capturing the model")
    dtype = TORCH_DTYPES[element_type]
    model = capture_model(model_directory, dtype)
    shapes = {
        name: tuple(int(size) for size in node.meta["val"].shape) for node, name in model.parameters.items()
    }
    rewrite(
        model.graph,
        weights={*model.parameters, *model.constants},
        positions=model.positions,
    )
    group_expert_linears(model.graph)
    slices = cut(model)
    constant_names = {node: f"constant.{node.name}" for node in model.constants}
    source, entries = emit(model, slices, constant_names)
    constants = {name: model.constants[node].contiguous() for node, name in constant_names.items()}
    if constants:
        save_file(constants, target / "constants.safetensors")
    manifest = Manifest(
        slices=tuple(entries),
        attention_specs=model.attention_specs,
        shapes=shapes,
        base_prefix=model.base_prefix,
        has_constants=bool(constants),
        source_sha256=hashlib.sha256(source.encode()).hexdigest(),
    )
    save_conversion(target, manifest, source)
    save_report(target, report_of(model, slices, spec.architecture, element_type))
    _rename_weights(model_directory, model, target, dtype, progress)
    progress("checking the program")
    program = load_converted(model_directory, spec, element_type, torch.device("cpu"), target)
    mixes = token_mixture(program)
    if mixes is not None:
        operator = _mixing_operator(model_directory, model, target, dtype)
        raise ModelError(
            f"{model_directory}: {spec.architecture} mixes tokens outside attention, {operator}"
            f"(logits differ by {mixes:.2g} of the largest): it cannot be batched"
        )


def _rename_weights(
    directory: Path, model: CapturedModel, target: Path, dtype: torch.dtype, progress: Callable[[str], None]
) -> None:
    """Where the files' names are not the model's (fused experts), transformers loads, and we store it so."""
    names = set(model.parameters.values())
    if not WeightFiles(weight_files(directory), model.base_prefix).missing(names):
        return
    import transformers

    progress("renaming the weights")
    answer: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    loaded, report = answer
    if report["missing_keys"]:
        raise ModelError(f"{directory}: the weight files lack {', '.join(sorted(report['missing_keys']))}")
    state = loaded.state_dict()
    (target / "weights").mkdir()
    save_file({name: state[name].contiguous() for name in names}, target / "weights" / "model.safetensors")


class _OwnToken:
    """Attention that lets every token see only itself, unlike any other by its Q, K and V."""

    def __init__(self, program: ModelProgram) -> None:
        self._group = program.attention_specs[0].heads // program.attention_specs[0].kv_heads
        self._output = torch.empty(0)

    def send_q(self, layer: int, q: torch.Tensor) -> None:
        self._output = q

    def send_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        wide_k, wide_v = (part.repeat_interleave(self._group, dim=1) for part in (k, v))
        self._output = (self._output * wide_k).sigmoid() + wide_v

    def receive(self, layer: int) -> torch.Tensor:
        return self._output.contiguous()


def token_mixture(program: ModelProgram) -> float | None:
    """How much a token's logits depend on the tokens beside it, of the largest logit; None if they do not."""
    count = len(CHECK_POSITIONS)
    token_ids, positions = _check_tokens(program.spec.vocab_size)
    together = program.run(token_ids, positions, _OwnToken(program), torch.arange(count)).float()
    row = torch.zeros(1, dtype=torch.int64)
    worst = 0.0
    for index in range(count):
        span = slice(index, index + 1)
        alone = program.run(token_ids[span], positions[span], _OwnToken(program), row).float()
        difference = float((together[index] - alone[0]).abs().max() / together.abs().max())
        worst = max(worst, difference) if difference == difference else float("inf")
    return worst if worst > CHECK_TOLERANCE[program.dtype] else None


def _check_tokens(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.tensor(CHECK_POSITIONS)
    return torch.arange(len(CHECK_POSITIONS)) * 7 % vocab_size, positions


def _mixing_operator(directory: Path, model: CapturedModel, target: Path, dtype: torch.dtype) -> str:
    """``in … `` of the operator that mixes tokens; empty where none alone does so visibly."""
    renamed = target / "weights"
    files = WeightFiles(weight_files(renamed if renamed.is_dir() else directory), model.base_prefix)

    def weight(name: str) -> torch.Tensor:
        tensor = files.tensor(name)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    vocab_size = int(model.output.meta["val"].shape[-1])
    token_ids, positions = (tokens.unsqueeze(0) for tokens in _check_tokens(vocab_size))
    node = mixing_operator(model, weight, token_ids, positions, CHECK_TOLERANCE[dtype])
    return "" if node is None else f"first by {describe(node)} "
