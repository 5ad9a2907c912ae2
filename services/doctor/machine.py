"""Memory, shared memory, file limits and the clock of this machine, or of the container it looks like."""

import ctypes
import os
import resource

import msgspec

from common.config import Config
from common.errors import TransferError
from common.transfer.buffers import SharedBuffer
from common.transfer.interface import RegionInfo
from services.doctor.child import ask_child
from services.doctor.findings import Finding, good, note, problem
from services.launcher.memory import INSTANCE_BYTES, available_memory_bytes, gibibytes

FEWEST_FILES = 256
"""Without any client: sockets, shared buffers of peers, logs, and Python's own."""
TIMEX_BYTES = 512
"""More than the kernel's struct timex, which is asked for, not set, where it is all zeros."""
CLOCK_UNSYNCHRONISED = 5


def examine_memory(config: Config) -> Finding:
    return judge_memory(available_memory_bytes(), config.instance.kv_bytes)


def judge_memory(available_bytes: int, kv_bytes: int) -> Finding:
    """Of a prefill and a decode instance, as `lamella up` starts them."""
    wanted_bytes = 2 * (kv_bytes + INSTANCE_BYTES)
    seen = f"{gibibytes(available_bytes)} available"
    if available_bytes < wanted_bytes:
        return note(
            "memory",
            f"{seen}; two instances may take {gibibytes(wanted_bytes)} once their KV pools are full",
            f"set `[instance] kv_bytes` below {kv_bytes}, or give this machine more",
        )
    return good("memory", seen)


def examine_shared_memory(config: Config) -> Finding:
    """Makes a buffer as large as an instance's pool and has another process map it, as a peer does."""
    subject, nbytes = "shared memory", config.instance.kv_bytes
    try:
        buffer = SharedBuffer(nbytes, "lamella-doctor")
    except OSError as exc:
        return problem(
            subject,
            f"no buffer of instance.kv_bytes = {nbytes} can be made ({exc.strerror})",
            "set `[instance] kv_bytes` lower, or raise the limit of this user's or container's memory",
        )
    try:
        region = RegionInfo("doctor", buffer.address, nbytes, buffer.handle)
        answer = ask_child("memory", str(os.getpid()), msgspec.json.encode(region).decode())
    except TransferError as exc:
        return problem(subject, str(exc), "see the log of the kernel")
    finally:
        buffer.close()
    if not answer.is_good:
        return problem(
            subject,
            f"another process of this user cannot map it: {answer.text}",
            "run all services as one user in one PID namespace with /proc mounted without hidepid, or set"
            ' `[transfer] path = "mooncake"`',
        )
    return good(subject, f"{gibibytes(nbytes)} can be made and mapped (anonymous: /dev/shm is not used)")


def examine_open_files(config: Config) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_open_files(soft, hard, config.gateway.max_open_requests)


def judge_open_files(soft: int, hard: int, open_requests: int) -> Finding:
    """``soft`` and ``hard`` are the process's limits; each open request of a gateway is a connection."""
    subject, wanted = "open files", open_requests + FEWEST_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return good(subject, "no limit" if soft == resource.RLIM_INFINITY else f"{soft} at once")
    can_be_raised = hard == resource.RLIM_INFINITY or hard >= wanted
    command = f"`ulimit -n {wanted}`" if can_be_raised else f"`ulimit -Hn {wanted}` as root"
    seen = f"{soft} at once; a gateway with gateway.max_open_requests = {open_requests} may need {wanted}"
    advice = f"{command} before lamella is started (systemd: LimitNOFILE, compose: ulimits)"
    return problem(subject, seen, advice) if soft < FEWEST_FILES else note(subject, seen, advice)


def examine_clock() -> Finding:
    """Whether somebody keeps this machine's clock right. The mesh itself never compares clocks."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    if state == CLOCK_UNSYNCHRONISED:
        return note(
            "clock",
            "not synchronised",
            "start an NTP client (chrony, systemd-timesyncd): serving does not depend on it, but logs and"
            " traces of several machines are laid side by side by their clocks",
        )
    return good("clock", "synchronised" if state >= 0 else "this container may not ask whether it is right")
