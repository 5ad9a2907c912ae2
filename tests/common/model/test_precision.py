from pathlib import Path

import pytest

from common.config import ModelConfig
from common.errors import ConfigError
from common.model import precision
from common.model.precision import (
    Precision,
    WeightForm,
    has_amx,
    has_fast_bf16,
    precision_of,
    weight_bytes,
)
from common.spec import ElementType


@pytest.mark.parametrize(
    ("line", "is_fast", "is_amx"),
    [
        ("flags\t\t: fpu sse2 avx512_vnni avx512_bf16", True, False),
        ("flags\t\t: fpu amx_bf16 amx_tile", True, True),
        ("Features\t: fp asimd bf16", True, False),
        ("flags\t\t: fpu sse2 avx512f", False, False),
        ("model name\t: bf16", False, False),
    ],
)
def test_bf16_is_fast_where_the_kernel_lists_its_instructions(
    tmp_path: Path, line: str, is_fast: bool, is_amx: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    assert has_fast_bf16(cpuinfo) is is_fast
    assert has_amx(cpuinfo) is is_amx


def test_an_unknown_processor_has_no_fast_bf16(tmp_path: Path) -> None:
    assert not has_fast_bf16(tmp_path / "absent")
    assert not has_amx(tmp_path / "absent")


@pytest.mark.parametrize(
    ("is_fast", "model", "expected"),
    [
        (True, ModelConfig(), Precision("bfloat16", "model")),
        (False, ModelConfig(), Precision("float32", "bf16")),
        (False, ModelConfig(weights="int8"), Precision("float32", "int8")),
        (True, ModelConfig(weights="int8"), Precision("bfloat16", "int8")),
        (True, ModelConfig(dtype="fp32"), Precision("float32", "model")),
        (False, ModelConfig(dtype="fp32", weights="w8a8"), Precision("float32", "w8a8")),
    ],
)
def test_bf16_weights_compute_in_what_the_processor_is_fast_at(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool, model: ModelConfig, expected: Precision
) -> None:
    monkeypatch.setattr(precision, "has_fast_bf16", lambda: is_fast)
    assert precision_of(model) == expected


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.device = 'tpu': must be cpu or cuda"):
        precision_of(ModelConfig(device="tpu"))


@pytest.mark.parametrize(
    ("compute", "weights", "expected"),
    [
        ("bfloat16", "model", 2),
        ("float32", "model", 4),
        ("float32", "bf16", 2),
        ("float32", "int8", 1),
        ("bfloat16", "w8a8", 1),
    ],
)
def test_a_step_reads_weights_in_the_form_that_they_are_held_in(
    compute: ElementType, weights: WeightForm, expected: int
) -> None:
    assert weight_bytes(Precision(compute, weights)) == expected
