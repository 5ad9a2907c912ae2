"""Makes ready what takes long the first time: the default model's weights, the captured program, kernels.

Done before any process starts, so that a progress line can be shown and several instances do not wait for
each other. Where everything is cached, nothing heavy is imported.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from common.config import Config
from common.errors import ModelError
from common.model.cache import cached_conversion
from common.model.cpu.library import compile_kernels, kept_kernels
from common.model.precision import precision_of, wants_compiled
from services.model_directory import model_directory

COMPILE = """
import sys
from pathlib import Path
from common.model.cpu.library import compile_kernels
compile_kernels(Path(sys.argv[1]))
"""


def prepare_model(config: Config, progress: Callable[[str], None]) -> None:
    """Converts, captures and compiles what the cache lacks. Raises ModelError, ConfigError."""
    try:
        _prepare(config, progress)
    except (OSError, SafetensorError) as exc:
        cache = config.model.cache_directory
        raise ModelError(f"model.cache_directory = {cache}: cannot be made ready there: {exc}") from exc


def _prepare(config: Config, progress: Callable[[str], None]) -> None:
    if config.instance.engine != "model":
        model_directory(config.model, progress)
        return
    cache, is_compiled = config.model.cache_directory, wants_compiled(config.model)
    with _compiling(cache if is_compiled else None, progress):
        directory = model_directory(config.model, progress)
        cached_conversion(directory, precision_of(config.model).compute, cache, progress)
    if is_compiled:
        compile_kernels(cache, progress)


@contextmanager
def _compiling(cache_directory: Path | None, progress: Callable[[str], None]) -> Iterator[None]:
    """Missing kernels are compiled on another core meanwhile. Whoever needs them sees whether it worked."""
    if cache_directory is None or kept_kernels(cache_directory) is not None:
        yield
        return
    child = subprocess.Popen([sys.executable, "-c", COMPILE, str(cache_directory)], stderr=subprocess.DEVNULL)
    try:
        yield
        progress("compiling kernels")
        child.wait()
    finally:
        child.kill()
        child.wait()
