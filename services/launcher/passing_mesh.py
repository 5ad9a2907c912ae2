"""A local mesh that a command starts for itself and ends again."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from common.config import Config
from services.launcher.launch_plan import LaunchPlan
from services.launcher.local import MeshNotRunning, down, ended_by_any_signal, up_detached
from services.prepare import prepare_model


@contextmanager
def passing_mesh(config: Config, status: Callable[[str], AbstractContextManager[object]]) -> Iterator[str]:
    """The URL of a mesh of one prefill and one decode instance, with servers of its own whichever ``config``
    names: others may use those. ``status`` tells a person what takes time."""
    # Not in a command's output: a socket's path has to be short.
    passing = tempfile.TemporaryDirectory(prefix="lamella-", ignore_cleanup_errors=True)
    with ended_by_any_signal(), passing as name:
        state_dir = Path(name)
        try:
            with status("starting a mesh"):
                prepare_model(config, lambda stage: None)
                mesh = up_detached(state_dir, LaunchPlan(port=0), config)
            assert mesh.url is not None, "a mesh that is ready has a gateway"
            yield mesh.url
        finally:
            # None runs where it did not start, or was interrupted meanwhile.
            with status("ending the mesh"), suppress(MeshNotRunning):
                down(state_dir)
