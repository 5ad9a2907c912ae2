"""Secrets that stand in files instead of the environment."""

from pathlib import Path

import pytest

from common.config_file import load_config
from common.errors import ConfigError
from common.secret_files import with_secrets

URL = "nats://lamella:hidden@nats:4222"


def test_a_url_is_read_from_the_file_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "nats_url"
    file.write_text(f"{URL}\n")
    assert with_secrets({"NATS_URL_FILE": str(file), "HOME": "/"}) == {"NATS_URL": URL, "HOME": "/"}
    assert load_config(None, {"NATS_URL_FILE": str(file)}).mesh.nats_url == URL


def test_without_a_file_the_environment_is_as_it_was() -> None:
    assert with_secrets({"NATS_URL": URL}) == {"NATS_URL": URL}


def test_a_secret_that_is_given_twice_is_refused_without_being_shown(tmp_path: Path) -> None:
    file = tmp_path / "redis_url"
    file.write_text("redis://:hidden@redis:6379/0")
    with pytest.raises(ConfigError, match=r"REDIS_URL_FILE.*cannot be combined with REDIS_URL") as caught:
        with_secrets({"REDIS_URL": "redis://:hidden@redis", "REDIS_URL_FILE": str(file)})
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("content", [b" \n", b"\xff\xfehidden"])
def test_a_file_that_holds_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "nats_url"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="NATS_URL_FILE") as caught:
        with_secrets({"NATS_URL_FILE": str(file)})
    assert "hidden" not in str(caught.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        with_secrets({"NATS_URL_FILE": str(tmp_path / "nowhere")})
