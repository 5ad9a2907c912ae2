"""Which model a process serves: the configured directory, or the embedded default."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from common.config import ModelConfig
from common.errors import ConfigError
from common.spec import read_spec

IDENTIFYING_FILES = ("config.json", "tokenizer.json")


def model_directory(config: ModelConfig, progress: Callable[[str], None] = lambda stage: None) -> Path:
    """The model's directory; the default model is converted into the cache the first time (half a minute).

    Raises ConfigError for a path that is no directory, ModelError for one that cannot be served.
    """
    if config.directory is None:
        from common.model.default_model import default_model_directory

        return default_model_directory(config.cache_directory, progress)
    directory = config.directory.expanduser().resolve()
    if not directory.is_dir():
        raise ConfigError("model.directory", str(config.directory), "must be a model's directory")
    read_spec(directory)
    return directory


def model_identity(directory: Path) -> str:
    """Its name, and a digest of its architecture and tokenizer: what was learned of one model says nothing of
    another."""
    digest = hashlib.blake2b(digest_size=6)
    for file in IDENTIFYING_FILES:
        path = directory / file
        digest.update(path.read_bytes() if path.exists() else b"")
    return f"{directory.name}-{digest.hexdigest()}"
