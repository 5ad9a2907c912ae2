"""Which files are refused, and what a conversion leaves on disk."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ModelError
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.model.attention import LocalAttention
from common.model.cache import load_manifest
from common.model.interface import SequenceChunk
from common.model.linears import can_multiply_bytes
from common.model.program import load_program
from tests.common.model.conftest import MakeTiny, save_tiny

CPU = torch.device("cpu")


def test_a_pickled_checkpoint_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        load_program(tmp_path / "model", "float32", CPU, tmp_path / "cache")


def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ModelError, match="not a safetensors file"):
        load_program(tmp_path / "model", "float32", CPU, tmp_path / "cache")


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    save_tiny("llama", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(ModelError, match=r"mlp.* = \(64, 32\): config\.json says \(48, 32\)"):
        load_program(directory, "float32", CPU, tmp_path / "cache")


def test_a_changed_source_is_not_run(tiny: MakeTiny, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    save_tiny("llama", directory)
    load_program(directory, "float32", CPU, tmp_path / "cache")
    (conversion,) = (path.parent for path in (tmp_path / "cache").glob("programs/*/manifest.json"))
    with (conversion / "slices.py").open("a") as source:
        source.write("\n# changed\n")
    with pytest.raises(ModelError, match="changed since it was generated"):
        load_manifest(conversion)


def test_slices_are_shared_by_equal_layers_and_carry_the_residual_stream(tiny: MakeTiny) -> None:
    model = tiny("opt")
    conversions = (model.directory.parent / "cache" / "programs").glob("opt-*/manifest.json")
    manifest, _ = load_manifest(next(conversions).parent)
    assert [entry.layer for entry in manifest.slices] == [0, 1, 2, None]
    assert manifest.slices[1].run == manifest.slices[2].run
    assert [len(entry.context_token_dims) for entry in manifest.slices] == [2, 1, 1, 1]


def test_a_cached_program_starts_without_transformers(tiny: MakeTiny) -> None:
    model = tiny("llama")
    script = (
        "import sys, torch, pathlib\n"
        "from common.model.program import load_program\n"
        "directory, cache = map(pathlib.Path, sys.argv[1:])\n"
        "load_program(directory, 'float32', torch.device('cpu'), cache)\n"
        "assert not {'transformers', 'networkx', 'common.model.capture'} & sys.modules.keys()\n"
    )
    arguments = [str(model.directory), str(model.directory.parent / "cache")]
    root = Path(__file__).parents[3]
    finished = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    ("element_type", "weights"),
    [
        ("bfloat16", "model"),
        ("float32", "bf16"),
        ("float32", "int8"),
        ("bfloat16", "int8"),
        pytest.param(
            "float32",
            "w8a8",
            marks=pytest.mark.skipif(
                not can_multiply_bytes(), reason="this torch and processor have no quantized linear"
            ),
        ),
    ],
)
def test_other_dtypes_and_weight_forms_stay_close(tiny: MakeTiny, element_type: Any, weights: Any) -> None:
    model = tiny("llama")
    cache = model.directory.parent / "cache"
    program = load_program(model.directory, element_type, CPU, cache, weights=weights)
    dtype = program.dtype
    pool = KVPool(KVLayout(3, 2, 8, 16, dtype.itemsize), 2, dtype, CPU)
    attention = LocalAttention(pool, program.attention_specs)
    attention.begin([SequenceChunk([1, 0], 0, 20)])
    token_ids = torch.arange(20) + 3
    logits = program.run(token_ids, torch.arange(20), attention, torch.arange(20)).float()
    with torch.no_grad():
        expected = model.reference(token_ids[None], use_cache=False).logits[0]
    assert float((logits - expected).norm() / expected.norm()) < 0.05
