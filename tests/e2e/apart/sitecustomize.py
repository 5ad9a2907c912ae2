"""Where this folder is on a process's path, it takes every other process for one of another host, as
containers take each other: no shared memory, and no word from the kernel of anybody's end."""

import os

import common.transfer.buffers as buffers

_host = buffers.host_identity
buffers.host_identity = lambda: f"{_host()}/{os.getpid()}"
