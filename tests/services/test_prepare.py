"""What takes long the first time, where it cannot be kept."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.config import Config, InstanceConfig, ModelConfig
from common.errors import ModelError
from common.model.cpu.library import compile_kernels
from services.prepare import prepare_model
from tests.common.model.conftest import MakeTiny

REPOSITORY = Path(__file__).parents[2]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A full disk ended `lamella up` with a traceback; here a file is in the way."""
    file = tmp_path / "file"
    file.touch()
    cache = file / "cache"
    config = Config(model=ModelConfig(cache_directory=cache), instance=InstanceConfig(engine="emulated"))
    with pytest.raises(ModelError, match=f"model.cache_directory = {cache}: .*Not a directory"):
        prepare_model(config, print)


AGAIN = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["numba"] = None
from pathlib import Path
from common.config import Config, ModelConfig
from services.prepare import prepare_model
directory, cache = map(Path, sys.argv[1:])
prepare_model(Config(model=ModelConfig(directory=directory, cache_directory=cache)), print)
"""


def test_what_is_kept_is_neither_made_nor_said_to_be_nor_does_it_take_torch(
    tiny: MakeTiny, tmp_path: Path
) -> None:
    """`lamella up` said so at every start, and imported torch for two seconds."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(compile_kernels(ModelConfig().cache_directory).parent)
    directory = tiny("llama").directory
    config = Config(model=ModelConfig(directory=directory, cache_directory=cache))
    stages: list[str] = []
    prepare_model(config, stages.append)
    assert stages
    assert "compiling kernels" not in stages
    command = [sys.executable, "-c", AGAIN, str(directory), str(cache)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
