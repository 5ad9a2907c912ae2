"""Meshes of small services: a test's own, and one that several leave as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.launcher import local
from tests.services.launcher.small_mesh import CONFIG, plan


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A state directory; whatever a test leaves running in it is ended."""
    yield tmp_path / "mesh"
    try:
        local.down(tmp_path / "mesh")
    except local.MeshNotRunning:
        return


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state directory of one mesh for the tests that leave it as they found it."""
    directory = tmp_path_factory.mktemp("running") / "mesh"
    local.up_detached(directory, plan(), CONFIG)
    yield directory
    local.down(directory)
