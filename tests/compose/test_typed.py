"""What the documents say to type with a container engine, typed; it ends the stack, so after its tests."""

import re

import pytest

from tests.compose.stack import BUILD_TIMEOUT_S, PRIVATE, PUBLISHED, Stack
from tests.documents import Block, blocks_of

pytestmark = pytest.mark.timeout(2400)

ENGINE = "a container engine"
PORTS = {"127.0.0.1:8000": PUBLISHED, "127.0.0.1:8001": PRIVATE}
EXPECTED = {
    r"^curl .*/v1/models$": r'"default"',
    r"cat /run/gateway-secrets/admin_key": r"^[\w-]{40,}$",
}
"""What such a command prints."""

BLOCKS = [
    block
    for document in ("README.md", "docs/containers.md")
    for block in blocks_of(document)
    if block.needs == ENGINE
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_what_the_documents_say_to_type_does_what_they_say(stack: Stack, block: Block) -> None:
    for line in block.text.splitlines():
        command = line
        for documented, published in PORTS.items():
            command = command.replace(documented, published)
        printed = stack.run("sh", "-c", command, timeout_s=BUILD_TIMEOUT_S)
        for pattern, wanted in EXPECTED.items():
            if re.search(pattern, line):
                assert re.search(wanted, printed, re.MULTILINE), f"{block.place}: {line}: {printed}"
        scaled = re.search(r"--scale (\w+)=(\d+)", line)
        if scaled is not None:
            assert len(stack.containers(scaled[1])) == int(scaled[2])
    assert stack.compose("ps", "--all", "--quiet").split() == []
