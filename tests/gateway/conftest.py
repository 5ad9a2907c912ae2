"""The default model's directory and tokenizer: the text side of everything the gateway does."""

from pathlib import Path

import pytest

from common.model.default_model import default_model_directory
from common.model.tokens import Tokenizer


@pytest.fixture(scope="session")
def model_directory() -> Path:
    return default_model_directory(Path("~/.cache/lamella"))


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer(model_directory)
