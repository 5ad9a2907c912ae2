"""What takes long the first time, where it cannot be kept."""

from pathlib import Path

import pytest

from common.config import Config, InstanceConfig, ModelConfig
from common.errors import ModelError
from common.model.cpu.library import compile_kernels
from services.prepare import prepare_model
from tests.common.model.conftest import MakeTiny


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A full disk ended `lamella up` with a traceback; here a file is in the way."""
    file = tmp_path / "file"
    file.touch()
    cache = file / "cache"
    config = Config(model=ModelConfig(cache_directory=cache), instance=InstanceConfig(engine="emulated"))
    with pytest.raises(ModelError, match=f"model.cache_directory = {cache}: .*Not a directory"):
        prepare_model(config, print)


def test_kernels_that_are_kept_are_not_said_to_be_compiled(tiny: MakeTiny, tmp_path: Path) -> None:
    """`lamella up` said so at every start."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(compile_kernels(ModelConfig().cache_directory).parent)
    config = Config(model=ModelConfig(directory=tiny("llama").directory, cache_directory=cache))
    stages: list[str] = []
    prepare_model(config, stages.append)
    assert stages
    assert "compiling kernels" not in stages
