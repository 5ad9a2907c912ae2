"""A process that measures passes begins anew as instances begin."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.launcher.launch_plan import ALLOCATOR_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[3]
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import os, sys
from services.profiling.allocating import begin_as_instances
begin_as_instances()
print(sys.argv[1:], os.environ["GLIBC_TUNABLES"], os.environ["MALLOC_TRIM_THRESHOLD_"])
memory = bytearray(1 << 26)
regions = open("/proc/self/smaps").read().split("VmFlags:")
flags = [each.partition("\\n")[0].split() for each in regions[1:]]
print(any("[heap]" in region and "hg" in of_it for region, of_it in zip(regions, flags)))
"""


def said_by_program(environment: Mapping[str, str]) -> list[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ALLOCATOR_ENVIRONMENT}
    program = [sys.executable, "-c", PROGRAM, "an argument"]
    done = subprocess.run(
        program, env={**kept, **environment}, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_it_has_the_environment_of_instances_and_its_own_arguments() -> None:
    wanted = ALLOCATOR_ENVIRONMENT
    said = f"['an argument'] {wanted['GLIBC_TUNABLES']} {wanted['MALLOC_TRIM_THRESHOLD_']}"
    assert said_by_program({})[0] == said


def test_what_somebody_has_set_stays() -> None:
    said = said_by_program({"GLIBC_TUNABLES": "glibc.malloc.check=0"})
    assert said[0].split("] ")[1].startswith("glibc.malloc.check=0 ")


@pytest.mark.skipif(
    not THP.exists() or "[madvise]" not in THP.read_text(),
    reason="this kernel gives huge pages to all or none",
)
def test_its_heap_is_of_huge_pages_where_those_are_to_be_asked_for() -> None:
    assert said_by_program({})[1] == "True"
    assert said_by_program({"GLIBC_TUNABLES": "glibc.malloc.check=0"})[1] == "False"
