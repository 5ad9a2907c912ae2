"""What `lamella scale` and `lamella drain` say, wherever the mesh runs."""

from pathlib import Path

import pytest

from common.errors import LauncherError
from services.commands.scale import drain, scale
from tests.services.connectors.programs import pretend_docker

FORCE = r"no instance would be left that does prefill: .*; --force ends the last$"


def test_the_option_that_ends_the_last_is_named_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_docker(tmp_path, monkeypatch)
    with pytest.raises(LauncherError, match=FORCE):
        scale(["prefill=0"], target="compose")
    with pytest.raises(LauncherError, match=FORCE):
        drain("lamella-prefill-1", target="compose")
