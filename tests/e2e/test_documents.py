"""What the documents tell a newcomer to type is typed here, block after block, as in two terminals.

With a mesh that one document leaves running the next one goes on. Only ports differ, and `make` finds this
interpreter's environment set up.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.listening import port_of, reserve
from tests.documents import ALL_DOCUMENTS, DOCUMENTS, ROOT, Block, blocks_of
from tests.e2e.meshes import LAMELLA, START_TIMEOUT_S

READY = "lamella is ready at"
STOP_TIMEOUT_S = 60.0
EXPECTED = {
    r'"stream": true': r"^data: \[DONE\]$",
    r"lamella status": r"^\s*decode-0 .* ready ",
    r"scale decode=2": r"decode-1 ready",
    r"flip decode-1 prefill": r"^decode-1 is a prefill instance",
    r"explain --newest": r"decode-0",
    r"lamella chat": r"\w",
    r"api/mesh": r'"decode-0"',
    r"lamella bench": r"TTFT",
    r"lamella top": r"^\s*decode-0 .* ready ",
    r"cat .lamella/admin-key": r"^[\w-]{40,}$",
}
"""What a block with such a command prints."""


class Terminals:
    """One for what stays, another for all else, in a directory that looks like a clone's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "first-terminal"
        self.staying: subprocess.Popen[bytes] | None = None
        for entry in ROOT.iterdir():
            if entry.name not in (".venv", ".lamella", ".git"):
                (directory / entry.name).symlink_to(entry)
        (directory / ".venv").symlink_to(sys.prefix)
        # An HTTP error is curl's error, too.
        (directory / ".curlrc").write_text("fail\nsilent\nshow-error\n")
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "CURL_HOME": str(directory)}
        self.reservation = reserve("127.0.0.1")
        self.port = port_of(self.reservation)

    def typed(self, text: str) -> str:
        """As a block says, at this test's port."""
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        text = text.replace("http://127.0.0.1:8001/", self.private_url())
        text = text.replace("lamella up ", f"lamella up --port {self.port} ")
        return text.replace("make serve", f"make --assume-old=setup serve UP='--port {self.port}'")

    def private_url(self) -> str:
        """Where the staying mesh has its page: beside its other port, where that is free."""
        found = re.search(r"(http://\S+/)ui/", self.log.read_text()) if self.log.exists() else None
        return "" if found is None else found.group(1)

    def run(self, block: Block) -> str:
        """What it printed. Fails the test with all of it where a command failed."""
        shell = [sys.executable] if block.language == "python" else ["bash", "-e", "-o", "pipefail"]
        done = subprocess.run(
            [*shell, "-c", self.typed(block.text)],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{block.place}: {done.stdout}{done.stderr}"
        return done.stdout

    def begin(self, block: Block) -> None:
        """Returns when its mesh serves; it may do so since an earlier document."""
        if self.staying is not None and self.staying.poll() is None:
            return
        with self.log.open("wb") as output:
            self.staying = subprocess.Popen(
                ["bash", "-c", self.typed(block.text)],
                cwd=self.directory,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while READY not in self.log.read_text():
            is_over = self.staying.poll() is not None or time.monotonic() > deadline_s
            assert not is_over, f"{block.place}: {self.log.read_text()}"
            time.sleep(0.1)

    def close(self) -> None:
        """Ctrl-C in the first terminal, and `lamella down` in the other for what runs detached."""
        if self.staying is not None and self.staying.poll() is None:
            os.killpg(self.staying.pid, signal.SIGINT)
            self.staying.wait(STOP_TIMEOUT_S)
        subprocess.run([*LAMELLA, "down"], cwd=self.directory, env=self.environment, check=False)
        self.reservation.close()


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminals]:
    terminals = Terminals(tmp_path_factory.mktemp("clone"))
    try:
        yield terminals
    finally:
        terminals.close()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_who_types_what_a_document_says_sees_what_it_says(document: str, terminals: Terminals) -> None:
    for block in blocks_of(document):
        if block.needs is not None or block.language in ("toml", "text"):
            continue
        if block.stays:
            terminals.begin(block)
            continue
        printed = terminals.run(block)
        for command, wanted in EXPECTED.items():
            if re.search(command, block.text):
                assert re.search(wanted, printed, re.MULTILINE), f"{block.place}: {printed}"


def test_a_mesh_that_is_ended_in_one_terminal_has_ended_well_in_the_other(terminals: Terminals) -> None:
    assert terminals.staying is not None
    assert terminals.staying.wait(STOP_TIMEOUT_S) == 0, terminals.log.read_text()


@pytest.mark.parametrize(
    "block",
    [block for document in ALL_DOCUMENTS for block in blocks_of(document) if block.needs],
    ids=lambda block: block.place,
)
def test_what_needs_more_than_this_machine_is_not_run(block: Block) -> None:
    pytest.skip(f"{block.place} needs {block.needs}: {block.text.splitlines()[0]}")
