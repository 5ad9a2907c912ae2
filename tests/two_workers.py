"""The tests beside each other, in two workers of pytest-xdist (`make test`).

One takes the tests whose meshes need the machine, one after another, first of all: mostly they wait, for a
process to start, a lease to end, a stream to go on. The other takes all others, file by file, in what is left
of the processor; what remains when the first is done they share.
"""

import os

import pytest
from xdist.scheduler import LoadScopeScheduling

ALONE = "tests/e2e/"
UNHURRIED = 5
"""The niceness of a worker of the others: a mesh's processes come first."""


def needs_the_machine(nodeid: str) -> bool:
    return nodeid.startswith(ALONE)


class TwoWorkers(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return ALONE if needs_the_machine(nodeid) else nodeid.split("::")[0]


def meshes_first(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not needs_the_machine(item.nodeid))


def give_way_to_meshes(nodeid: str) -> None:
    niceness = os.nice(0)
    if not needs_the_machine(nodeid) and niceness < UNHURRIED:
        os.nice(UNHURRIED - niceness)
