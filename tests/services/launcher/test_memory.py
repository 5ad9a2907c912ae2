"""How many processes a machine has memory for."""

from pathlib import Path

import pytest

from common.config import AttentionConfig, Config, InstanceConfig, ModelConfig, PredictorConfig
from common.errors import LauncherError
from common.scaling import ScaledRole
from services.launcher.memory import check_memory

GIB = 1 << 30
EMULATED = Config(instance=InstanceConfig(engine="emulated"))


def test_more_instances_than_there_is_memory_for_are_refused_with_both_figures() -> None:
    """64 were started on 24 GiB, and nothing answered any more, `lamella down` least of all."""
    said = r"decode \+62 would take 62\.0 GiB before the first request, and this machine has 20\.0 GiB"
    with pytest.raises(LauncherError, match=said):
        check_memory({"decode": 62, "prefill": -1}, Config(), 20 * GIB)


def test_pools_that_are_too_large_when_they_are_full_are_told_of() -> None:
    large = Config(instance=InstanceConfig(kv_bytes=40 * GIB))
    said = check_memory({"prefill": 1, "decode": 1}, large, 20 * GIB)
    assert said is not None
    assert "prefill +1, decode +1 may take 82.0 GiB once their KV pools are full" in said
    assert check_memory({"prefill": 1, "decode": 1}, Config(), 20 * GIB) is None
    assert check_memory({"decode": 0, "prefill": -3}, large, GIB) is None


@pytest.mark.parametrize(
    ("more", "config"),
    [
        ({"decode": 64}, EMULATED),
        ({"gateway": 64}, Config()),
        ({"decode": 8}, Config(model=ModelConfig(device="cuda"), instance=InstanceConfig(kv_bytes=40 * GIB))),
        ({"decode": 8}, Config(instance=InstanceConfig(kv_bytes=40 * GIB, attention_workers=2))),
        ({"attention": 2}, Config(attention=AttentionConfig(device="cuda", kv_bytes=40 * GIB))),
    ],
    ids=["emulated", "no torch", "on a device", "KV at attention workers", "worker on a device"],
)
def test_what_takes_no_memory_of_the_machine_is_not_counted(
    more: dict[ScaledRole, int], config: Config
) -> None:
    assert check_memory(more, config, 10 * GIB) is None


def test_a_models_weights_count_by_their_files(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(3 * GIB)
    config = Config(model=ModelConfig(directory=tmp_path))
    with pytest.raises(LauncherError, match=r"mixed \+2 would take 7\.0 GiB"):
        check_memory({"mixed": 2}, config, 6 * GIB)


def test_workers_and_classifiers_bring_torch() -> None:
    config = Config(predictor=PredictorConfig(kind="classifier", directory=Path("classifier")))
    with pytest.raises(LauncherError, match=r"attention \+2, predictor \+2 would take 2\.0 GiB"):
        check_memory({"attention": 2, "predictor": 2}, config, GIB)
