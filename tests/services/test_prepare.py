"""What takes long the first time, where it cannot be kept."""

from pathlib import Path

import pytest

from common.config import Config, InstanceConfig, ModelConfig
from common.errors import ModelError
from services.prepare import prepare_model


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A full disk ended `lamella up` with a traceback; here a file is in the way."""
    file = tmp_path / "file"
    file.touch()
    cache = file / "cache"
    config = Config(model=ModelConfig(cache_directory=cache), instance=InstanceConfig(engine="emulated"))
    with pytest.raises(ModelError, match=f"model.cache_directory = {cache}: .*Not a directory"):
        prepare_model(config, print)
