"""Compiled kernels on disk, and in this process as plain C functions.

numba compiles them once per machine into object files (its own cache would be pickles); llvmlite loads these
in some milliseconds, without numba, and ctypes calls them, which frees the interpreter for other threads.
"""

import ctypes
import ctypes.util
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import msgspec

WORD, FLOAT = ctypes.c_int64, ctypes.c_float
OPERATORS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (*[WORD] * 5, FLOAT),
    "add_rms_norm": (*[WORD] * 7, FLOAT),
    "rotate": (WORD,) * 8,
    "silu_multiply": (WORD,) * 7,
    "take_new": (*[WORD] * 17, FLOAT, FLOAT),
}
"""Arguments of those in ``kernels.EXPORTED`` that are there for each form of elements; none has a result."""
LONG = {"run_job", "help_until_idle"}
"""Others may run Python meanwhile; for the rest, giving the interpreter away would cost more than they do."""
MATHEMATICS = ("memset", "memcpy", "memmove", "logf", "tanhf", "sqrtf", "floorf")
"""What code generation may call on its own, of the C and mathematics libraries."""
SOURCES = (
    "atoms.py",
    "blocks.py",
    "jobs.py",
    "kernels.py",
    "library.py",
    "paged_attention.py",
    "panels.py",
    "products.py",
)
SYMBOLS = "symbols.json"

Kernel = Callable[..., Any]


class Operators(NamedTuple):
    """Of one form of elements, float32 or bf16."""

    rms_norm: Kernel
    add_rms_norm: Kernel
    rotate: Kernel
    silu_multiply: Kernel
    take_new: Kernel


class Contents(msgspec.Struct, frozen=True):
    """Of a directory: each kernel's symbol, and what the code refers to outside itself."""

    symbols: dict[str, str]
    externals: tuple[str, ...]


class KernelLibrary:
    """The kernels of one directory: ``operators`` by the dtype of what they are given. Keeps the memory their
    code is in."""

    def __init__(self, directory: Path) -> None:
        import torch  # which only whoever computes needs: whether kernels are kept is asked at every start

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        contents = msgspec.json.decode((directory / SYMBOLS).read_bytes(), type=Contents)
        _define(contents.externals)
        symbols = contents.symbols
        self._engines: list[Any] = []
        self.run_job = self._load(directory, symbols, "run_job", None, (WORD, WORD))
        self.help_until_idle = self._load(directory, symbols, "help_until_idle", WORD, (WORD, WORD))

        def operators(form: str) -> Operators:
            loaded = {
                name: self._load(directory, symbols, f"{name}_{form}", None, arguments)
                for name, arguments in OPERATORS.items()
            }
            return Operators(**loaded)

        self.operators: dict[torch.dtype, Operators] = {
            torch.float32: operators("floats"),
            torch.bfloat16: operators("halves"),
        }

    def _load(
        self, directory: Path, symbols: dict[str, str], name: str, result: Any, arguments: tuple[Any, ...]
    ) -> Kernel:
        machine = llvm.Target.from_default_triple().create_target_machine()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        code = (directory / f"{name}.o").read_bytes()
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._engines.append(engine)
        kind = ctypes.CFUNCTYPE if name in LONG else ctypes.PYFUNCTYPE
        return kind(result, *arguments)(engine.get_function_address(symbols[name]))


def load_kernels(cache_directory: Path) -> KernelLibrary:
    """Compiled first where the cache lacks them. Raises OSError as ``compile_kernels``."""
    return KernelLibrary(compile_kernels(cache_directory))


def kept_kernels(cache_directory: Path) -> Path | None:
    """Where they lie; None where they have to be compiled."""
    found = (place / _key() for place in _places(cache_directory))
    return next((directory for directory in found if (directory / SYMBOLS).is_file()), None)


def _places(cache_directory: Path) -> tuple[Path, Path]:
    return cache_directory.expanduser() / "kernels", _temporary_directory()


def compile_kernels(cache_directory: Path, progress: Callable[[str], None] = lambda stage: None) -> Path:
    """Where the kernels lie, for this processor and these versions; made now (some seconds) if need be.

    Where the cache cannot be written, they are kept in the temporary directory. Raises OSError where neither
    can.
    """
    kept = kept_kernels(cache_directory)
    if kept is not None:
        return kept
    key, parents = _key(), _places(cache_directory)
    failure: OSError | None = None
    for parent in parents:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=parent, prefix=".compiling-"))
            progress("compiling kernels")
            try:
                _compile(scratch)
                scratch.chmod(0o755)  # another user's service may read the cache
                _move(scratch, parent / key)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        except OSError as exc:
            failure = exc
            continue
        return parent / key
    raise OSError(
        f"compiled kernels can be kept neither in {parents[0]} nor in {parents[1]}: {failure}"
    ) from failure


def _move(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        if not (target / SYMBOLS).is_file():  # else another process was faster
            raise


def _compile(directory: Path) -> None:
    import numba

    # LLVM keeps from 512-bit vectors for the sake of the code around them; here there is none.
    features = llvm.get_host_cpu_features().flatten()
    if "+avx512f" in features:
        numba.config.CPU_FEATURES = f"{features},-prefer-256-bit"
    from common.model.cpu.atoms import FAST
    from common.model.cpu.kernels import EXPORTED

    symbols: dict[str, str] = {}
    externals = {*MATHEMATICS}
    for name, (function, signature) in EXPORTED.items():
        compiled: Any = numba.cfunc(signature, fastmath=FAST, error_model="numpy")(function)
        library = compiled._library
        module = library._final_module
        for each in (*module.functions, *module.global_variables):
            if each.is_declaration and not each.name.startswith("llvm."):
                externals.add(each.name)
        code = library.codegen._tm.emit_object(module)
        (directory / f"{name}.o").write_bytes(code)
        symbols[name] = compiled._wrapper_name
    contents = Contents(symbols, tuple(sorted(externals)))
    (directory / SYMBOLS).write_bytes(msgspec.json.encode(contents))


def _define(externals: tuple[str, ...]) -> None:
    """Gives code what it refers to: one name that is missing would leave all of them undefined.

    What is nowhere here is numba's own, for exceptions and arrays with owners. Kernels have neither: reaching
    it is a defect and ends the process.
    """
    mathematics = ctypes.CDLL(ctypes.util.find_library("m"))
    for name in externals:
        if llvm.address_of_symbol(name) is not None:
            continue
        found = next((each for each in (mathematics, ctypes.pythonapi) if hasattr(each, name)), None)
        function = mathematics.abort if found is None else getattr(found, name)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        llvm.add_symbol(name, address)


def _key() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    for package in ("numba", "llvmlite"):
        digest.update(importlib.metadata.version(package).encode())
    digest.update(llvm.get_host_cpu_name().encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode())
    return digest.hexdigest()[:16]


def _temporary_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"lamella-kernels-{os.getuid()}"
