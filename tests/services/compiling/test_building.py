"""The simulator compiled: the same records as interpreted, to the bit, over every kind of mesh."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from services.compiling import building
from services.compiling.building import READY, build, tree_of
from services.compiling.entering import TREE
from services.compiling.errors import CompileError
from services.compiling.modules import COMPILED

REPOSITORY = Path(__file__).parents[3]
ROLES = ("prefill", "decode")
RECORDS = """\
import json, os, random, sys
from pathlib import Path
import decode.state, prefill.state, scheduler.state, services.simulator.run as run_module
from common.profile import write_profile
from services.simulator.metrics import measure
from services.simulator.run import Load, simulate
from tests.services.simulator import meshes, test_attention_host, test_faults, test_late, test_vidur_rows
from tests.services.simulator.meshes import pool, run
from tests.services.simulator.performance.test_profiled import made

chance = random.Random(1)
load = [(0.1 * number, chance.randint(50, 900), chance.randint(2, 60)) for number in range(60)]
found = {name: measure(run(mesh, *load)).digest for name, mesh in test_late.MESHES.items()}
befallen = Load(test_faults.steady(60, 0.06), retries=20)
for arrangement, keys in test_faults.ARRANGEMENTS.items():
    mesh = test_faults.befallen(*test_faults.FAULTS["all of it"], **keys)
    found["all of it: " + arrangement] = measure(simulate(mesh, befallen, seed=2)).digest
write_profile(Path(sys.argv[1]), made())
profiled = {"kind": "profile", "path": sys.argv[1]}
models = {
    "roofline": pool("mixed", device="a100", performance={"kind": "roofline"}),
    "a profile's table": pool(
        "mixed",
        performance=profiled | {"overhead_s": 1e-4, "overhead_token_s": 2e-5, "overhead_prompt_s": 3e-4},
    ),
    "a profile's law": pool("mixed", performance=profiled | {"by": "law"}),
}
for name, mixed in models.items():
    found["by " + name] = measure(run(meshes.mesh(mixed), *load)).digest
costs = {"pass_s": 1e-3, "token_s": 1e-4, "prompt_s": 5e-3, "prompt_token_s": 1e-5, "idle_cores": 0.03}
costs |= {"beside_s_per_rate": 4e-5, "beside_share": 0.1, "turns_share": 0.2, "turns_hold_s": 0.02}
for name, one in {
    "apart": meshes.mesh(pool("prefill"), pool("decode"), host={"cores": 2} | costs),
    "mixed": meshes.mesh(pool("mixed", 2), host={"cores": 1} | costs),
    "over a worker": test_attention_host.over_a_worker(host={"cores": 2} | costs),
}.items():
    found["on one host, " + name] = measure(run(one, *load)).digest
orders = {"": {}, "in groups": {"grouped": True}, "in turn": {"prefill_policy": "deferred"}}
for name, rules in orders.items():
    members = {"hop_s": 2e-4, "schedulers": 3}
    one = meshes.mesh(pool("prefill", 2), pool("decode", 4), cluster=members, scheduler=rules)
    found["several schedulers " + name] = measure(run(one, *load)).digest
shared = Path(os.environ.get("LAMELLA_SHARED", "../shared"))
if shared.is_dir():
    for row in ("vidur_34b.toml", "vidur_70b.toml"):
        found[row] = test_vidur_rows.run_row(shared, row, test_vidur_rows.CONVERSATIONS).metrics.digest
modules = (decode.state, prefill.state, scheduler.state, run_module)
json.dump({"records": found, "files": [each.__file__ for each in modules]}, sys.stdout)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In which the simulator was compiled, by the command."""
    if shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is None:
        pytest.skip("NO C COMPILER here: whether the simulator compiles is not tested")
    cache = tmp_path_factory.mktemp("cache")
    done = lamella("compile", cache=cache)
    assert done.returncode == 0, done.stderr
    return cache


def lamella(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    said = {key: value for key, value in os.environ.items() if key not in (TREE, "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=REPOSITORY,
        env=said | {"LAMELLA_CACHE": str(cache)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(1200)
def test_records_are_the_same_to_the_bit_over_every_kind_of_mesh(cache: Path, tmp_path: Path) -> None:
    [tree] = (path for path in (cache / "simulator").iterdir() if path.is_dir())
    told = []
    for path in (f"{tree}{os.pathsep}{REPOSITORY}", str(REPOSITORY)):
        done = subprocess.run(
            [sys.executable, "-P", "-c", RECORDS, str(tmp_path / "profile.json")],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    compiled, interpreted = told
    assert all(file.startswith(str(tree)) and file.endswith(".so") for file in compiled["files"])
    assert all(file.startswith(str(REPOSITORY)) and file.endswith(".py") for file in interpreted["files"])
    assert compiled["records"] == interpreted["records"]
    assert len(compiled["records"]) > 15


@pytest.mark.timeout(1200)
def test_the_command_uses_what_was_compiled_and_says_the_same(cache: Path, tmp_path: Path) -> None:
    mesh, trace = tmp_path / "mesh.toml", tmp_path / "trace.csv"
    linear = 'performance = { kind = "linear", prefill_s = 0.01, per_prompt_token_s = 1e-4, step_s = 0.02 }'
    pools = (
        f'[[pool]]\nname = "{role}"\nrole = "{role}"\ncount = 1\nkv_tokens = 100000\n{linear}\n'
        for role in ROLES
    )
    mesh.write_text('[cluster]\nmodel = "llama3-70b"\n' + "".join(pools))
    rows = "".join(f"{number * 0.2:.1f},{100 + number},{20 + number % 9}\n" for number in range(50))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    outputs: list[bytes] = []
    environments: tuple[dict[str, str], ...] = ({}, {TREE: ""})
    for environment in environments:
        output = tmp_path / f"metrics-{len(outputs)}.json"
        arguments = ("simulate", str(mesh), "--trace", str(trace), "--json", str(output))
        done = lamella(*arguments, cache=cache, **environment)
        assert done.returncode == 0, done.stderr
        outputs.append(output.read_bytes())
    assert outputs[0] == outputs[1]
    again = lamella("compile", cache=cache)
    assert again.returncode == 0
    assert "compiled already" in again.stderr


def test_source_that_changes_is_another_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "common" / "one.py"
    source.parent.mkdir()
    source.write_text("X = 1\n")
    monkeypatch.setattr(building, "_root", lambda: tmp_path)
    before = tree_of(tmp_path)
    assert tree_of(tmp_path) == before
    source.write_text("X = 2\n")
    assert tree_of(tmp_path) != before


def test_without_a_compiler_it_says_so_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler"):
        build(tmp_path)
    assert not (tree_of(tmp_path) / READY).exists()


def test_source_that_is_not_fit_for_it_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """mypy's own words are told."""
    root = tmp_path / "root"
    (root / "common").mkdir(parents=True)
    (root / "common" / "one.py").write_text('X: int = "one"\n')
    monkeypatch.setattr(building, "_root", lambda: root)
    monkeypatch.setattr(building, "PACKAGES", ("common",))
    monkeypatch.setattr(building, "COMPILED", ("common.one",))
    with pytest.raises(CompileError, match=r"common/one\.py:\d+: error: Incompatible"):
        build(tmp_path / "cache")
    left = [path.name for path in (tmp_path / "cache" / "simulator").iterdir()]
    assert left == ["building.lock"]


def test_every_module_that_is_compiled_is_there() -> None:
    assert len(set(COMPILED)) == len(COMPILED)
    assert [name for name in COMPILED if not (REPOSITORY / f"{name.replace('.', '/')}.py").is_file()] == []
