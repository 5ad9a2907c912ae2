"""GPUs and RDMA cards: what is there, what torch and Mooncake would make of it, what the settings ask for."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.config import Config
from services.doctor.child import TorchDevices, ask_child
from services.doctor.findings import Finding, good, note, problem
from services.launcher.memory import gibibytes

DEVICE_FILES = Path("/dev")
INFINIBAND = Path("/sys/class/infiniband")
ACTIVE = "ACTIVE"


def examine_gpu(config: Config) -> Finding:
    """Imports torch in a process of its own: seconds."""
    devices = {config.model.device, config.attention.device, *config.instance.replica_devices}
    answer = ask_child("torch")
    if not answer.is_good:
        return problem("GPU", f"torch cannot be loaded: {answer.text}", "run `make clean setup`")
    return judge_gpu(
        msgspec.json.decode(answer.text, type=TorchDevices), has_nvidia_driver(), sorted(devices - {"cpu"})
    )


def has_nvidia_driver() -> bool:
    is_card = any(file.name.removeprefix("nvidia").isdigit() for file in DEVICE_FILES.glob("nvidia*"))
    return is_card or shutil.which("nvidia-smi") is not None


def judge_gpu(torch: TorchDevices, has_driver: bool, wanted: Sequence[str]) -> Finding:
    """``wanted`` are the settings' devices that are not the CPU."""
    absent = [device for device in wanted if index_of(device) >= len(torch.names)]
    if torch.names and not absent:
        cards = ", ".join(
            f"{name} ({gibibytes(size)})" for name, size in zip(torch.names, torch.memory_bytes, strict=True)
        )
        if wanted:
            return good("GPU", f"{cards}; used: {', '.join(wanted)}")
        return note(
            "GPU", f"{cards}; unused", 'set `[model] device = "cuda"` (LAMELLA_DEVICE=cuda) to use it'
        )
    if not has_driver:
        advice = 'set `[model] device = "cpu"`, or run on a machine with an NVIDIA driver'
        if wanted:
            return problem("GPU", f"none, and the settings ask for {', '.join(wanted)}", advice)
        return good("GPU", f"none; torch {torch.version} computes on the CPU")
    if torch.cuda is None:
        seen = f"a GPU is there, and torch {torch.version} is built for CPUs"
        advice = "run `make clean setup` where `nvidia-smi` is on PATH: it installs torch for CUDA"
    elif torch.names:
        seen = f"there is no {', '.join(absent)}: torch sees {len(torch.names)}"
        advice = "correct `[model] device`, `[attention] device` or CUDA_VISIBLE_DEVICES"
    else:
        seen = f"a GPU is there, and torch {torch.version} (CUDA {torch.cuda}) cannot use it"
        advice = "see whether `nvidia-smi` works and its driver knows that CUDA; containers need --gpus all"
    return problem("GPU", seen, advice) if wanted else note("GPU", seen, advice)


def index_of(device: str) -> int:
    """cuda is the first one, cuda:1 the second."""
    return int(device.partition(":")[2] or 0)


def examine_rdma(config: Config) -> Finding:
    return judge_rdma(rdma_ports(INFINIBAND), is_wanted=config.transfer.protocol == "rdma")


def rdma_ports(directory: Path) -> dict[str, str]:
    """The state of every port, as the kernel names both: ``mlx5_0 port 1`` → ``4: ACTIVE``."""
    return {
        f"{file.parents[2].name} port {file.parent.name}": file.read_text(encoding="ascii").strip()
        for file in sorted(directory.glob("*/ports/*/state"))
    }


def judge_rdma(ports: dict[str, str], *, is_wanted: bool) -> Finding:
    active = [port for port, state in ports.items() if state.endswith(ACTIVE)]
    if active and is_wanted:
        return good("RDMA", f"active: {', '.join(active)}")
    if active:
        return note(
            "RDMA",
            f"active: {', '.join(active)}; unused",
            'set `[transfer] protocol = "rdma"` to hand KV over between machines through it',
        )
    if ports:
        seen = ", ".join(f"{port} is {state}" for port, state in ports.items())
        advice = "bring the link up: `ibstat` and the switch say what is missing"
        return problem("RDMA", seen, advice) if is_wanted else note("RDMA", seen, advice)
    if is_wanted:
        return problem(
            "RDMA", "the settings ask for it, and there is no card", 'set `[transfer] protocol = "tcp"`'
        )
    return good("RDMA", "no card; KV goes over TCP between machines")
