"""What docs/operating.md's table of commands says, typed in the directory of a running mesh's state."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.e2e.meshes import START_TIMEOUT_S, Mesh, environment, running_mesh

EMULATED = """
[service]
port = 0
[instance]
engine = "emulated"
block_size = 16
[emulation]
decode_base_s = 0.005
"""
TYPED = {
    "lamella doctor --config .lamella.toml --port 0 --json": r'"verdict"',
    "lamella status --json": r'"decode-0"',
    "lamella top --once --url PRIVATE_URL": r"decode-0",
    'lamella chat --max-tokens 8 "a question"': r"\w",
    "lamella explain --newest 1 --exact": r"decode-0",
    "lamella scale prefill=2 decode=+1 --target local": r"decode: 1 → 2 \(decode-1 ready\)",
    "deploy/scale/decode.sh 3": r"decode: 2 → 3 \(decode-2 ready\)",
    "lamella drain decode-2": r"decode-2 has drained",
    "lamella flip decode-1 prefill": r"decode-1 is a prefill instance",
    "lamella targets": r"decode-1",
    "lamella settings": r"\[scheduler\]",
    "lamella bench --url URL --concurrency 2 --requests 2 --prompt-tokens 8 --output-tokens 4": r"TTFT",
    "lamella convert MODEL --explain --svg slices.svg": r"slice",
    "lamella analyze MODEL --devices h100,h20": r"h20",
}
"""In this order, and what each prints. Capitals stand for what only the running mesh knows."""
STAYING = {
    "lamella targets --watch targets.json": "targets.json",
}
"""Until Ctrl-C, and the file that each writes."""
ELSEWHERE = {
    "up": "tests/e2e/test_documents.py",
    "down": "tests/e2e/test_documents.py",
    "autoscale": "tests/services/autoscaling/test_autoscale.py",
    "trace": "tests/e2e/test_trace.py",
    "serve": "tests/services/hosts/test_serve.py",
    "compare": "tests/services/compare/test_run.py",
    "predictor": "tests/services/length_predictor/test_command.py",
}
"""What needs a load, runs for long or by itself is typed there."""
BY_HAND = {"profile"}
"""Minutes on every core."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running_mesh(tmp_path_factory.mktemp("operating") / ".lamella", config=EMULATED) as mesh:
        yield mesh


def documented() -> list[list[str]]:
    """The words of every command in the table's first column, options in brackets among them."""
    cells = re.findall(r"^\| (`.*?`) \| ", (ROOT / "docs/operating.md").read_text(), re.MULTILINE)
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    return [re.sub(r"[\[\]]", "", code).replace(r"\|", "|").split() for code in codes if " " in code]


def command_of(words: list[str]) -> str:
    return words[1] if words[0] == "lamella" else words[0]


def options_of(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_every_command_of_the_table_is_typed_with_every_option_that_it_names() -> None:
    typed: dict[str, set[str]] = {}
    for line in (*TYPED, *STAYING):
        words = shlex.split(line)
        typed.setdefault(command_of(words), set()).update(options_of(words))
    assert documented()
    for words in documented():
        command = command_of(words)
        if command in ELSEWHERE:
            assert re.search(rf"\b{command}\b", (ROOT / ELSEWHERE[command]).read_text()), command
        elif command not in BY_HAND:
            assert options_of(words) <= typed[command], words


def test_who_types_the_table_sees_what_it_says(mesh: Mesh, tiny_model: Path) -> None:
    known = json.loads(mesh.lamella("status", "--json"))
    names = {"PRIVATE_URL": known["private_url"], "URL": mesh.url, "MODEL": str(tiny_model)}
    for line, wanted in TYPED.items():
        done = subprocess.run(
            typed(line, names),
            cwd=mesh.state_dir.parent,
            env=terminal(),
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        assert re.search(wanted, done.stdout + done.stderr), f"{line}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("line", STAYING)
def test_what_stays_does_so_until_ctrl_c(mesh: Mesh, line: str) -> None:
    directory = mesh.state_dir.parent
    with subprocess.Popen(typed(line, {}), cwd=directory, env=terminal()) as process:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (directory / STAYING[line]).exists():
            assert process.poll() is None, "it has ended"
            assert time.monotonic() < deadline_s, "it writes nothing"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.wait(START_TIMEOUT_S)
    assert json.loads((directory / STAYING[line]).read_text())


def typed(line: str, names: dict[str, str]) -> list[str]:
    words = [names.get(word, word) for word in shlex.split(line)]
    if words[0] == "lamella":
        return [sys.executable, "-m", "services.cli", *words[1:]]
    return [str(ROOT / words[0]), *words[1:]]


def terminal() -> dict[str, str]:
    """`deploy/scale` finds `lamella` as it is installed beside this interpreter."""
    return {**environment(), "LAMELLA": str(Path(sys.executable).with_name("lamella"))}
