"""Whether this machine has the memory that processes of a mesh take, before any of them is started."""

from collections.abc import Mapping
from pathlib import Path

from common.config import Config
from common.errors import LauncherError
from common.scaling import ScaledRole
from services.launcher.launch_plan import ROLES

INSTANCE_BYTES = 1 << 30
"""What an instance takes beside its KV: the default model's weights and torch, generously."""
TORCH_BYTES = 512 << 20
"""Of a process with torch and no weights."""
LIGHT_BYTES = 64 << 20
"""Of one without torch."""
CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Of a container: version 2's, and version 1's."""


def available_memory_bytes() -> int:
    """Of the machine, or what a container may have of it in all."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for file in CGROUP_LIMITS:
        text = file.read_text(encoding="ascii").strip() if file.exists() else "max"
        if text.isdigit():
            available = min(available, int(text))
    return available


def check_memory(more: Mapping[ScaledRole, int], config: Config, available_bytes: int) -> str | None:
    """Of so many more processes. Raises LauncherError where they would not even start; else it says what may
    become too much once their KV pools are full."""
    started = {role: count for role, count in more.items() if count > 0}
    told = ", ".join(f"{role} +{count}" for role, count in started.items())
    seen = f"this machine has {gibibytes(available_bytes)} available"
    at_start = sum(count * _start_bytes(role, config) for role, count in started.items())
    if at_start > available_bytes:
        raise LauncherError(f"{told} would take {gibibytes(at_start)} before the first request, and {seen}")
    when_full = at_start + sum(count * _pool_bytes(role, config) for role, count in started.items())
    if when_full > available_bytes:
        return f"{told} may take {gibibytes(when_full)} once their KV pools are full, and {seen}"
    return None


def _start_bytes(role: ScaledRole, config: Config) -> int:
    if role in ROLES:
        return LIGHT_BYTES if config.instance.engine == "emulated" else _instance_bytes(config)
    if role == "attention" or (role == "predictor" and config.predictor.kind == "classifier"):
        return TORCH_BYTES
    return LIGHT_BYTES


def _instance_bytes(config: Config) -> int:
    """A device has its weights in memory of its own."""
    if config.model.device != "cpu":
        return TORCH_BYTES
    if config.model.directory is None:
        return INSTANCE_BYTES
    weights = config.model.directory.expanduser().glob("*.safetensors")
    return TORCH_BYTES + sum(file.stat().st_size for file in weights)


def _pool_bytes(role: ScaledRole, config: Config) -> int:
    """On the host."""
    if role == "attention":
        return config.attention.kv_bytes if config.attention.device == "cpu" else 0
    if role not in ROLES or config.instance.engine == "emulated" or config.model.device != "cpu":
        return 0
    is_remote = role == "decode" and config.instance.attention_workers > 0
    return 0 if is_remote else config.instance.kv_bytes


def gibibytes(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
