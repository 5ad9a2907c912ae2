"""The only importer of Mooncake: one transfer engine per process, and nobody else sees it.

Mooncake (FAST'25) moves registered memory between processes. Its engine answers 0 and -1, reads its settings
from the environment at first use, and crashes the process when it is used before its start or with an id it
has freed. This module keeps to what was seen to hold:

- the environment is complete before ``mooncake.engine`` is imported;
- one engine per process, refused in a forked child (its IO thread did not survive the fork);
- an id is polled until its first terminal answer, which frees it, and then forgotten (``MooncakeLink``);
- each first contact uses a spelling of the address that was never used before: the engine keeps a peer's
  descriptor for ever, and under an old spelling would write to the port of a process that is gone.

Run over TCP. ``rdma`` and ``nvlink`` set the environment that Mooncake documents and have not been run: they
need a card, and nvlink needs buffers from cudaMalloc (no expandable segments). There is no authentication and
no choice of interface: whoever reaches the ports can write into registered memory. Keep them inside the mesh.
"""

import asyncio
import ctypes
import importlib
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from common.config import TransferConfig
from common.transfer.interface import EngineStartError, RegionError, RegionOverlap
from common.transfer.regions import Region

Result = TypeVar("Result")

NATIVE_LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "libnuma.so.1")
"""In the order in which they need one another."""
CUDA_LIBRARY = "libmlx5.so.1"
"""What the build for CUDA links beside these."""
NATIVE_DIRECTORY = Path(sys.prefix) / "lib" / "lamella-native"
"""Where ``deploy/libibverbs.sh`` unpacks them when it may not install."""

INFINIBAND = Path("/sys/class/infiniband")
RC_OVERLAP = -7
BENIGN_START_LINES = ("Logging before InitGoogleLogging", "Local segment descriptor not found")

_engine_pid: int | None = None
"""The process that holds the engine, None while there is none."""


def set_environment(
    environ: MutableMapping[str, str], config: TransferConfig, progress_timeout_s: int
) -> None:
    """Mooncake's settings, before its import. What the operator has set already stays."""
    settings = {
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        # Over 1,024 queued transfers the older default rejects the excess and can wedge the peer for good.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        # A connection carries one slice at a time: with more of them a stopped peer's slices fail sooner.
        "MC_TCP_LANES_PER_PEER": "16",
        # Mooncake cuts each submit again; at its default of 64 KiB a run of 98 KiB costs a quarter more.
        "MC_TCP_SLICE_SIZE": str(1 << 20),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(progress_timeout_s),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(progress_timeout_s),
        # Over the progress timeout, so that a failure is always a terminal one.
        "MC_TRANSFER_TIMEOUT": str(max(60, 2 * progress_timeout_s)),
        "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
        "MC_MIN_RPC_PORT": str(config.min_port),
        "MC_MAX_RPC_PORT": str(config.max_port),
        "MC_LOG_LEVEL": "ERROR",
    }
    if config.protocol == "tcp":
        # The protocol's name does not choose the transport: hardware and this variable do.
        settings["MC_FORCE_TCP"] = "1"
    else:
        environ.pop("MC_FORCE_TCP", None)
    if config.protocol == "nvlink":
        settings["MC_INTRANODE_NVLINK"] = "1"
    for key, value in settings.items():
        environ.setdefault(key, value)
    # MC_LOG_DIR aborts the process, MC_TCP_PROTO turns the acknowledgement off.
    for key in ("MC_LOG_DIR", "MC_TCP_PROTO"):
        environ.pop(key, None)


def import_engine_module() -> Any:
    """``mooncake.engine``. Raises EngineStartError that says what is missing and how to get it."""
    if all((NATIVE_DIRECTORY / library).exists() for library in NATIVE_LIBRARIES):
        for library in (*NATIVE_LIBRARIES, CUDA_LIBRARY):
            if (NATIVE_DIRECTORY / library).exists():
                ctypes.CDLL(str(NATIVE_DIRECTORY / library), mode=ctypes.RTLD_GLOBAL)
    try:
        return _import_with_cuda_runtime()
    except ModuleNotFoundError as exc:
        raise EngineStartError(
            "Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda==0.3.13.post1"
        ) from exc
    except ImportError as exc:
        raise EngineStartError(
            f"Mooncake cannot be loaded ({exc}): run `apt-get install -y libibverbs1 libnuma1 libcurl4` (and "
            "ibverbs-providers for its build for CUDA), or `make setup`, which also works without root"
        ) from exc


def _import_with_cuda_runtime() -> Any:
    """The build for CUDA links its runtime, which comes with torch and lies where only torch looks. Raises
    ImportError."""
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as exc:
        if "libcudart" not in str(exc):
            raise
        with suppress(ImportError):
            importlib.import_module("torch")
        return importlib.import_module("mooncake.engine")


class MooncakeEngine:
    """This process's engine: memory, address, and the four calls that links make.

    ``start``, ``close``, ``probe`` and ``read`` block and belong in threads; ``register``, ``submit_write``
    and ``poll`` take microseconds. Every call raises EngineStartError before ``start``, after ``close`` and
    in a forked child.
    """

    def __init__(self, config: TransferConfig, host: str, progress_timeout_s: int) -> None:
        self.first_contact = asyncio.Lock()
        """Held while a thread opens a peer: that holds the engine's one mutex, so one at a time."""
        self.reads_host_memory = config.protocol != "nvlink"
        """Whether a nonce can be read through this engine."""
        self._config = config
        self._host = host
        self._progress_timeout_s = progress_timeout_s
        self._engine: Any = None
        self._pid = 0
        self._address = ""
        self._spellings_used: Counter[str] = Counter()

    def start(self) -> None:
        """Imports and initialises Mooncake (some 0.1 s). Raises EngineStartError."""
        global _engine_pid
        if _engine_pid == os.getpid():
            raise EngineStartError("this process has a Mooncake engine already")
        self._check_hardware()
        set_environment(os.environ, self._config, self._progress_timeout_s)
        module = import_engine_module()
        if self._config.protocol == "nvlink" and not getattr(module, "SUPPORT_INTRA_NVLINK", False):
            raise EngineStartError("this build of Mooncake has no nvlink: install lamella[cuda]")
        engine = module.TransferEngine()
        protocol = "rdma" if self._config.protocol == "rdma" else "tcp"
        with _captured_stderr() as lines:
            code = engine.initialize(self._host, "P2PHANDSHAKE", protocol, "")
        if code != 0:
            raise EngineStartError(
                f"Mooncake did not start ({self._config.protocol} on {self._host}, ports "
                f"{self._config.min_port}-{self._config.max_port}): {' | '.join(lines) or code}"
            )
        port = engine.get_rpc_port()
        wanted = range(int(os.environ["MC_MIN_RPC_PORT"]), int(os.environ["MC_MAX_RPC_PORT"]) + 1)
        if port not in wanted:
            raise EngineStartError(
                f"Mooncake took port {port} instead of one in {wanted[0]}-{wanted[-1]}: it ignores a range "
                "that touches /proc/sys/net/ipv4/ip_local_port_range"
            )
        self._engine = engine
        self._pid = _engine_pid = os.getpid()
        self._address = f"{self._host}:{port}"

    def _check_hardware(self) -> None:
        """Mooncake would silently take TCP instead."""
        if self._config.protocol == "rdma" and not any(INFINIBAND.glob("*")):
            raise EngineStartError(f"transfer.protocol = 'rdma': no device in {INFINIBAND}")

    @property
    def address(self) -> str:
        """``ipv4:port``, where peers make first contact."""
        self.check()
        return self._address

    def check(self) -> None:
        """Raises EngineStartError unless this process has started the engine and not closed it."""
        if self._engine is None:
            raise EngineStartError("the Mooncake engine is not running")
        if self._pid != os.getpid():
            raise EngineStartError(
                f"the Mooncake engine of process {self._pid} is used in its fork {os.getpid()}: "
                "its IO thread did not survive; start processes with spawn or exec"
            )

    def register(self, region: Region) -> None:
        """Raises RegionOverlap or RegionError."""
        self.check()
        code = self._engine.register_memory(region.base, region.nbytes, "*")
        if code == RC_OVERLAP:
            raise RegionOverlap(f"Mooncake holds memory inside region {region.name!r} already")
        if code != 0:
            raise RegionError(f"Mooncake refused region {region.name!r} of {region.nbytes} bytes ({code})")

    def unregister(self, region: Region) -> None:
        """From now on the engine refuses to write there."""
        self.check()
        self._engine.unregister_memory(region.base)

    def submit_write(self, peer_address: str, source: int, destination: int, nbytes: int) -> int | None:
        """The slice's id, or None when it was not taken."""
        slice_id: int = self._engine.transfer_submit_write(peer_address, source, destination, nbytes)
        return slice_id or None

    def poll(self, slice_id: int) -> bool | None:
        """True arrived, False failed: both free the id. None: not terminal yet."""
        status = self._engine.transfer_check_status(slice_id)
        if status == 1:
            return True
        return False if status == -1 else None

    def probe(self, peer_address: str) -> bool:
        """Whether something answers there. Blocks as long as a mute peer keeps the connection."""
        self.check()
        return bool(self._engine.send_probe(peer_address) == 0)

    def read(self, peer_address: str, local: int, remote: int, nbytes: int) -> bool:
        """Reads ``nbytes`` from the peer. First use opens the peer and holds the engine's mutex meanwhile."""
        self.check()
        return bool(self._engine.transfer_sync_read(peer_address, local, remote, nbytes) == 0)

    def open_segment(self, peer_address: str) -> bool:
        """First contact without a read, for nvlink. Holds the engine's mutex meanwhile."""
        self.check()
        return bool(self._engine.get_first_buffer_address(peer_address) != 0)

    def fresh_spelling(self, peer_address: str) -> str:
        """The address as this engine has never seen it: 10.0.0.7:1, then 0x0a000007:1, 0x00a000007:1 ..."""
        used = self._spellings_used[peer_address]
        self._spellings_used[peer_address] += 1
        if not used:
            return peer_address
        host, _, port = peer_address.rpartition(":")
        number = int.from_bytes(bytes(int(part) for part in host.split(".")), "big")
        return f"0x{'0' * used}{number:x}:{port}"

    def close(self) -> None:
        """Drops the engine: up to 1 s with the GIL held, so last of all. Links must be closed before."""
        global _engine_pid
        if self._engine is not None and self._pid == os.getpid():
            self._engine = None
            _engine_pid = None


@contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Collects what native code writes to stderr, the only place where it gives reasons.

    The benign lines are dropped, all others are also written through at the end.
    """
    lines: list[str] = []
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as capture:
        os.dup2(capture.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            capture.seek(0)
            written = capture.read().decode(errors="replace").splitlines()
            lines += [line for line in written if not any(text in line for text in BENIGN_START_LINES)]
            for line in lines:
                print(line, file=sys.stderr)


def run_in_thread(call: Callable[[], Result], name: str) -> "asyncio.Future[Result]":
    """Runs a blocking call in a daemon thread of its own, which may outlive everybody who waits for it.

    A pool would be joined at exit, and a mute peer can hold such a call for a minute.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def deliver(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def target() -> None:
        result: Result | None = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as exc:  # handed to whoever waits
            error = exc
        # The loop may be closed by the time a stuck call returns; then nobody waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=target, name=name, daemon=True).start()
    return future
