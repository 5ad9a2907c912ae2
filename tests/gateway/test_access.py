"""Who may use a gateway."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from common.errors import ConfigError
from gateway.access import read_admin_key, read_api_keys
from tests.e2e.meshes import LAMELLA, ROOT, environment

DIGEST = hashlib.sha256(b"a key").hexdigest()


def test_a_key_is_known_by_its_digest_with_names_and_comments_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    other = hashlib.sha256(b"another").hexdigest()
    file.write_text(f"# who has them\n\n{DIGEST} alice\n{other}\n")
    keys = read_api_keys(file)
    assert keys.admit(b"a key")
    assert keys.admit(b"another")
    assert not keys.admit(b"a keys")
    assert not keys.admit(b"")
    assert not keys.admit(DIGEST.encode())


@pytest.mark.parametrize(
    ("text", "rule"),
    [("a key\n", "line 1"), ("", "at least one"), (f"{DIGEST}\n{DIGEST.upper()}\n", "line 2")],
)
def test_a_file_that_holds_no_digests_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rule):
        read_api_keys(file)


def test_a_gateway_that_cannot_read_its_keys_says_so_as_it_ends(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(f'[gateway]\napi_keys_file = "{tmp_path}/none"\n')
    command = [*LAMELLA, "serve", "gateway", "--config", str(config)]
    ended = subprocess.run(
        command, check=False, env=environment(), cwd=ROOT, stderr=subprocess.PIPE, timeout=60
    )
    last = json.loads(ended.stderr.splitlines()[-1])
    assert (ended.returncode, last["event"]) == (1, "service_failed")
    assert "gateway.api_keys_file" in last["error"]


def test_a_missing_file_and_a_short_admin_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_admin_key(tmp_path / "none")
    file = tmp_path / "key"
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="16 characters"):
        read_admin_key(file)


def test_an_admin_key_is_its_files_text_without_the_lines_end(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    assert read_admin_key(file).admit(b"0123456789abcdef")
