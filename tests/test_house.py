"""The house's own rules: floors, wires, dangerous calls, and services that start without torch."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.logs import STANDARD_FIELDS

REPOSITORY = Path(__file__).resolve().parents[1]
ROOMS = ("common", "gateway", "scheduler", "prefill", "decode", "attention", "services", "deploy")

WIRES = {
    "nats": {"common/nats_connection.py"},
    "redis": {"common/store.py"},
    "mooncake": {"common/transfer/"},
    "opentelemetry": {"common/spans.py"},
}
"""The only importers of each foreign library: files, or folders with a final slash."""

DECISIONS = "Decisions know no clock, no IO, no torch"
IMPURE = {"asyncio", "time", "random", "secrets", "logging", "torch", "nats", "redis", "mooncake", "fastapi"}
"""What a decision may not import: the same events must always give the same commands."""

USES_TORCH = (
    "common/model/",
    "common/kv/pool.py",
    "common/kv/host_memory.py",
    "common/transfer/",
    "decode/remote_attention.py",
    "decode/pipeline.py",
    "attention/service.py",
    "services/doctor/child.py",
    "services/hosts/model_engine.py",
    "services/length_predictor/embeddings.py",
    "services/length_predictor/training.py",
    "services/profiling/operators/",
    "services/profiling/probe.py",
)
"""Besides every room's engine.py. Instances load the model through ``services.hosts.model_engine``."""

WRITTEN = {".py", ".js", ".css", ".sh", ".yaml", ".yml", ".toml", ".conf"}
"""By hand, line by line: dashboards are Grafana's, locks pip's, tables and pages as wide as their cells."""
LONGEST_LINE = 110

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "pickle.loads",
    "pickle.load",
}

NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "mooncake"):
            raise ImportError(f"{name} is not installed here")
        return None
sys.meta_path.insert(0, Refuse())
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Full names of everything imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages_of(tree: ast.Module) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(tree)}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def decisions() -> list[Path]:
    """The modules, and those of the packages, that the import linter's contract names."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    [modules] = [each["source_modules"] for each in contracts if each["name"] == DECISIONS]
    found: list[Path] = []
    for module in modules:
        path = REPOSITORY / module.replace(".", "/")
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return found


def committed() -> list[Path]:
    """Skips the test where git cannot tell."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: cannot tell which files are committed")
    paths = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_every_room_is_a_package_with_a_purpose() -> None:
    for room in ROOMS:
        init = REPOSITORY / room / "__init__.py"
        assert init.is_file(), f"{room}/ is no package"
        assert ast.get_docstring(tree_of(init)), f"{room}/__init__.py does not say what the room is for"


def test_every_module_says_what_it_is_for() -> None:
    silent = [name_of(path) for path in sources() if not ast.get_docstring(tree_of(path))]
    assert silent == []


def test_torch_stays_where_tensors_are() -> None:
    for path in sources():
        name = name_of(path)
        if name.startswith(USES_TORCH) or path.name == "engine.py":
            continue
        assert not {each.partition(".")[0] for each in imports_of(tree_of(path))} & {"torch"}, name


def test_decisions_know_no_clock_no_io_and_no_torch() -> None:
    assert decisions(), "there are decisions to look at"
    for path in decisions():
        assert not packages_of(tree_of(path)) & IMPURE, name_of(path)


@pytest.mark.parametrize("library", WIRES)
def test_only_its_wire_imports_a_foreign_library(library: str) -> None:
    allowed = WIRES[library]
    importers = {name_of(path) for path in sources() if library in packages_of(tree_of(path))}
    strangers = {
        name
        for name in importers
        if name not in allowed and not any(name.startswith(folder) for folder in allowed if folder[-1] == "/")
    }
    assert strangers == set()


def test_nothing_that_runs_a_stranger_s_code_is_called() -> None:
    for path in sources():
        tree = tree_of(path)
        assert not packages_of(tree) & FORBIDDEN_IMPORTS, name_of(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                assert dotted(node.func) not in FORBIDDEN_CALLS, f"{name_of(path)}:{node.lineno}"
                for keyword in node.keywords:
                    is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                    trusts = keyword.arg == "trust_remote_code" and is_true
                    assert not trusts, f"{name_of(path)}:{node.lineno} trusts a model's code"


def test_rooms_do_not_import_each_other() -> None:
    """Policies are decisions below the rooms, so every room may use them."""
    rooms = {"gateway", "scheduler", "prefill", "decode", "attention"}
    for path in sources():
        room = name_of(path).partition("/")[0]
        imported = {
            name.partition(".")[0]
            for name in imports_of(tree_of(path))
            if not f"{name}.".startswith("scheduler.policy.")
        }
        if room in rooms:
            assert not imported & (rooms - {room} | {"services"}), name_of(path)
        if room == "common":
            assert not imported & (rooms | {"services"}), name_of(path)


@pytest.mark.parametrize(
    "modules",
    [
        ("gateway.service", "gateway.app"),
        ("scheduler.service", "services.hosts.scheduler_host"),
        ("services.cli",),
    ],
    ids=["gateway", "scheduler", "command line"],
)
def test_it_starts_where_torch_is_not_installed(modules: tuple[str, ...]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *modules],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


def test_nothing_that_is_committed_names_a_machine() -> None:
    """A path of the machine it was made on would mean nothing to anybody else."""
    words = tuple("/" + word for word in ("work/", "opt/wheels", "opt/pypi"))
    for path in committed():
        if path.stat().st_size < 1 << 20:
            text = path.read_text(errors="replace")
            assert not any(word in text for word in words), name_of(path)


def test_no_line_is_longer_than_can_be_read() -> None:
    """In characters, as the linter counts Python's."""
    long = [
        f"{name_of(path)}:{number}"
        for path in committed()
        if path.suffix in WRITTEN or path.name in ("Dockerfile", "Makefile")
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if len(line) > LONGEST_LINE
    ]
    assert long == []


def test_no_field_of_a_log_line_has_a_name_that_is_taken() -> None:
    """Python refuses some amid the line, and others would hide whose line it is."""
    taken = STANDARD_FIELDS | {"time", "level", "service", "logger", "event", "exception"}
    found = [
        f"{name_of(path)}:{line}: {field}"
        for path in sources()
        for line, field in fields_logged(tree_of(path))
        if field in taken
    ]
    assert found == []


def fields_logged(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where, and which: of the tables given as ``extra``, there or by their names in the same function."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(ast.walk(function))
        keywords = [each for node in nodes if isinstance(node, ast.Call) for each in node.keywords]
        given = [node for each in keywords if each.arg == "extra" for node in ast.walk(each.value)]
        names = {node.id for node in given if isinstance(node, ast.Name)}
        made = [node for node in nodes if isinstance(node, ast.Assign)]
        given += [node.value for node in made if names & {ast.unparse(each) for each in node.targets}]
        for key in (key for table in given if isinstance(table, ast.Dict) for key in table.keys):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.lineno, key.value
