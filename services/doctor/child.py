"""Examinations that need a process of their own, ``python -m services.doctor.child QUESTION …``.

A native library that does not fit this machine ends the process that loads it, and whether memory can be
shared only another process can tell. The answer is one line on standard output; the exit status says whether
it is a good one.
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

TIMEOUT_S = 60.0
"""Importing torch from a cold disk takes the longest."""


class TorchDevices(msgspec.Struct, frozen=True):
    """``cuda`` is the version that torch was built for, None for a CPU build; ``names`` are of its GPUs."""

    version: str
    cuda: str | None
    names: list[str]
    memory_bytes: list[int]


@dataclass(frozen=True, slots=True)
class ChildAnswer:
    """``text`` is the answer, or why there is none."""

    is_good: bool
    text: str


def ask_child(*question: str) -> ChildAnswer:
    """Asks a child process; its crash and its silence are answers, too."""
    root = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    try:
        child = subprocess.run(
            [sys.executable, "-m", "services.doctor.child", *question],
            env={**os.environ, "PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return ChildAnswer(False, f"no answer within {TIMEOUT_S:g} s")
    said = child.stdout.strip() or child.stderr.strip().rpartition("\n")[2]
    if child.returncode < 0:
        return ChildAnswer(False, f"it ended with {signal.Signals(-child.returncode).name}")
    return ChildAnswer(child.returncode == 0, said or f"it ended with status {child.returncode}")


def torch_devices() -> str:
    """TorchDevices as JSON. Raises ImportError, OSError where torch cannot be loaded."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = TorchDevices(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        names=[torch.cuda.get_device_name(index) for index in range(count)],
        memory_bytes=[torch.cuda.get_device_properties(index).total_memory for index in range(count)],
    )
    return msgspec.json.encode(devices).decode()


def load_mooncake() -> str:
    """Raises EngineStartError."""
    from common.transfer.mooncake import import_engine_module

    import_engine_module()
    return "loads"


def map_memory(pid: int, region: str) -> str:
    """Maps the memory of another process as a peer does. ``region`` is a RegionInfo as JSON.

    Raises TransferError.
    """
    from common.transfer.buffers import map_region
    from common.transfer.interface import RegionInfo

    mapped = map_region(pid, msgspec.json.decode(region, type=RegionInfo))
    mapped.mapping[0] = 1
    return "mapped"


def main(question: str, *arguments: str) -> int:
    try:
        match question:
            case "torch":
                answer = torch_devices()
            case "mooncake":
                answer = load_mooncake()
            case _:
                answer = map_memory(int(arguments[0]), arguments[1])
    except Exception as exc:
        # Whatever it is, it is the answer.
        print(str(exc).partition("\n")[0] or type(exc).__name__)
        return 1
    print(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
