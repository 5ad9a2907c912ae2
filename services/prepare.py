"""Makes ready what takes long the first time: the default model's weights and the captured program.

Done before any process starts, so that a progress line can be shown and several instances do not wait for
each other. Where everything is cached, nothing heavy is imported.
"""

from collections.abc import Callable

from common.config import Config
from common.model.cache import cached_conversion
from common.model.cpu.library import compile_kernels
from common.model.precision import precision_of, wants_compiled
from services.model_directory import model_directory


def prepare_model(config: Config, progress: Callable[[str], None]) -> None:
    """Converts and captures what the cache lacks. Raises ModelError, ConfigError."""
    directory = model_directory(config.model, progress)
    if config.instance.engine == "model":
        element_type = precision_of(config.model).compute
        cache = config.model.cache_directory
        cached_conversion(directory, element_type, cache, progress)
        if wants_compiled(config.model):
            compile_kernels(cache, progress)
