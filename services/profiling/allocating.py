"""A process that measures passes allocates memory as instances do, or it measures what they never take."""

import os
import sys

from services.launcher.launch_plan import ALLOCATOR_ENVIRONMENT


def begin_as_instances() -> None:
    """Begins this program anew in the environment that the launcher gives its services, unless it has it: an
    allocator reads it once, as a process starts."""
    lacking = {key: value for key, value in ALLOCATOR_ENVIRONMENT.items() if key not in os.environ}
    if lacking:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **lacking})
