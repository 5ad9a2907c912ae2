"""The default model's directory and tokenizer: the text side of everything the gateway does."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import Config, GatewayConfig, MeshConfig
from common.model.default_model import default_model_directory
from common.model.tokens import Tokenizer
from tests.gateway.clients import TEXT
from tests.gateway.processes import GatewayProcess, running_gateway

CACHE = Path(os.environ.get("LAMELLA_CACHE", "~/.cache/lamella"))


@pytest.fixture(scope="session")
def model_directory() -> Path:
    return default_model_directory(CACHE)


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer(model_directory)


@pytest.fixture
def ids(tokenizer: Tokenizer) -> list[int]:
    """``TEXT`` as tokens."""
    return tokenizer.encode(TEXT)


@pytest.fixture(scope="module")
def gateway(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway alone in its mesh; tests speak for everybody else (``scripted_peer``)."""
    config = gateway_config(nats_url, redis_url)
    with running_gateway(config, tmp_path_factory.mktemp("gateway")) as process:
        yield process


def gateway_config(nats_url: str, redis_url: str) -> Config:
    """Short times, so that what waits for them is seen; a namespace of its own."""
    return Config(
        mesh=MeshConfig(
            namespace=f"t-{secrets.token_hex(6)}",
            nats_url=nats_url,
            redis_url=redis_url,
            call_timeout_s=1.0,
        ),
        gateway=GatewayConfig(
            max_body_bytes=100_000,
            max_open_requests=8,
            wait_for_instance_s=0.0,
            keep_alive_comment_s=0.4,
            slow_reader_timeout_s=1.0,
            header_timeout_s=3.0,
            body_timeout_s=3.5,
            token_timeout_s=6.0,
        ),
    )
