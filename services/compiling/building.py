"""Makes machine code of the decisions and the simulator around them, from the source that runs interpreted.

It lies in the cache under the source's own digest, so that what was compiled of another source is never run.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from common.file_lock import exclusive
from services.compiling.errors import CompileError
from services.compiling.modules import COMPILED, PACKAGES
from services.compiling.rewriting import rewritten

READY = "compiled"
"""A file that a tree has once it is whole."""
KEPT = 3
"""Trees, those used last: of other checkouts, branches and interpreters."""
_LOG = "build.log"
_NEEDED = ("mypyc", "setuptools")
_MYPY_INI = """\
[mypy]
ignore_missing_imports = True
[mypy-common.model.*]
follow_imports = skip
[mypy-torch.*]
follow_imports = skip
"""
_SETUP = """\
import tempfile
from pathlib import Path

from mypyc.build import mypycify
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

paths = {paths!r}
# Sums as Python has them, also where a processor multiplies and adds at once.
exact = "-ffp-contract=off"
# Modules call one another all the time, and nobody else does: as if all were one file.
as_one = ["-flto=auto", "-fvisibility=hidden", "-fno-semantic-interposition"], ["-flto=auto", "-O3", exact]


def links_as_one(compiler):
    compiled_with, linked_with = as_one
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "one.c")
        source.write_text("int one(void) {{ return 1; }}")
        try:
            objects = compiler.compile([str(source)], output_dir=directory, extra_preargs=compiled_with)
            compiler.link_shared_object(objects, f"{{directory}}/one.so", extra_preargs=linked_with)
        except (CompileError, LinkError):
            return False
    return True


class Build(build_ext):
    def build_extensions(self):
        is_one = links_as_one(self.compiler)
        print("linked as one" if is_one else "linked by modules: this compiler cannot link as one")
        for extension in self.extensions:
            extension.extra_compile_args += [exact, *(as_one[0] if is_one else [])]
            extension.extra_link_args += as_one[1] if is_one else []
        super().build_extensions()


extensions = mypycify(["--config-file", "mypy.ini", *paths], opt_level="3", debug_level="0", multi_file=True)
setup(name="simulator", packages=[], ext_modules=extensions, cmdclass={{"build_ext": Build}})
"""


def tree_of(cache_directory: Path) -> Path:
    """Where this source's compiled tree lies, or would."""
    return cache_directory.expanduser() / "simulator" / _key(_root())


def build(cache_directory: Path) -> Path:
    """The tree, made now where the cache has none: packages as they are, of which some have machine code
    beside them. One process makes it, others wait. Raises CompileError."""
    target = tree_of(cache_directory)
    if (target / READY).is_file():
        return target
    _check_tools()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target.parent / "building.lock"):
            if not (target / READY).is_file():
                _build(target)
    except OSError as exc:
        rule = "the cache must be a directory that can be written ($LAMELLA_CACHE)"
        raise CompileError(f"{exc.filename or target.parent}: {exc.strerror}: {rule}") from exc
    return target


def _build(target: Path) -> None:
    """While nobody else does. What was left of a build that was killed goes."""
    for path in target.parent.glob(".building-*"):
        shutil.rmtree(path, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".building-"))
    try:
        _copy(scratch)
        if _key(scratch) != target.name:
            raise CompileError(f"{_root()}: the source changed meanwhile: call it again")
        _compile(scratch)
        for path in (scratch, *scratch.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # another user may read the cache
        (scratch / READY).touch()
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _forget_others(target)


def _root() -> Path:
    return Path(__file__).parents[2]


def _key(root: Path) -> str:
    """Everything that a tree depends on: the source, and what compiles and loads it."""
    digest = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    digest.update(f"{suffix} {sysconfig.get_platform()} {_version('mypy')}".encode())
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_tools() -> None:
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise CompileError(f"compiling takes {name}: pip install 'lamella[compiled]'")
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise CompileError(f"compiling takes a C compiler ($CC), there is no {compiler}: apt-get install gcc")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise CompileError(f"compiling takes Python's headers, there is no {header}: get python3-dev")


def _copy(tree: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "node_modules")
    for package in PACKAGES:
        shutil.copytree(_root() / package, tree / package, ignore=ignored)


def _compile(tree: Path) -> None:
    paths = [f"{name.replace('.', '/')}.py" for name in COMPILED]
    sources = {path: (tree / path).read_text() for path in paths}
    for path, source in sources.items():
        (tree / path).write_text(rewritten(source, path))
    (tree / "mypy.ini").write_text(_MYPY_INI)
    (tree / "setup.py").write_text(_SETUP.format(paths=paths))
    command = [sys.executable, "setup.py", "build_ext", "--inplace", "--parallel", str(os.cpu_count() or 1)]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MYPYPATH")}
    with (tree / _LOG).open("wb") as log:
        done = subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode:
        said = (tree / _LOG).read_text(errors="replace").splitlines()
        reasons = [line for line in said if "error:" in line] or said
        raise CompileError("\n".join(["not everything could be compiled:", *reasons[-20:]]))
    for path, source in sources.items():
        # What is imported is beside it. Digests are of the source.
        (tree / path).write_text(source)
    for left in ("build", ".mypy_cache"):
        shutil.rmtree(tree / left, ignore_errors=True)


def _forget_others(newest: Path) -> None:
    trees = [each for each in newest.parent.iterdir() if (each / READY).is_file() and each != newest]
    trees.sort(key=lambda each: (each / READY).stat().st_mtime)
    for tree in trees[: max(0, len(trees) + 1 - KEPT)]:
        # First of all nobody is to begin from it.
        (tree / READY).unlink(missing_ok=True)
        shutil.rmtree(tree, ignore_errors=True)
