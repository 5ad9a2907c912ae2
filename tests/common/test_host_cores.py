import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.host_cores import Computing, HostCores

CLAIM_UNTIL_KILLED = """
import sys
from pathlib import Path
from common.host_cores import HostCores
cores = HostCores(8, Path(sys.argv[1]), sys.argv[2])
cores.claim()
print("claimed", flush=True)
sys.stdin.readline()
cores.release()
print("released", flush=True)
sys.stdin.readline()
"""


def claiming_process(path: Path, computing: Computing = "engine") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM_UNTIL_KILLED, str(path), computing],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"
    return process


def test_cores_are_shared_equally_among_those_who_compute(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    cores = HostCores(8, path)
    assert cores.share() == 8
    cores.claim()
    assert cores.share() == 8
    neighbours = [claiming_process(path) for _ in range(3)]
    try:
        assert cores.share() == 2
        first = neighbours[0]
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == "released\n"
        assert cores.share() == 2  # 8 // 3
        for neighbour in neighbours[1:]:
            neighbour.kill()
            neighbour.wait()
        assert cores.share() == 8  # the kernel took the locks of the dead back
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()
        cores.close()


def test_attention_workers_share_what_an_engine_has_and_take_none_from_it(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    worker, other = HostCores(8, path, "attention"), HostCores(8, path)
    neighbours = [claiming_process(path)]
    try:
        assert worker.share() == 8  # the engine waits for it
        worker.claim()
        assert other.share() == 4  # two engines, whoever attends for them
        neighbours.append(claiming_process(path))
        assert worker.share() == 4
        neighbours.append(claiming_process(path, "attention"))
        assert worker.share() == 2
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()
        worker.close()
        other.close()


def test_everybody_gets_one_core_at_least(tmp_path: Path) -> None:
    cores = HostCores(1, tmp_path / "cores")
    neighbour = claiming_process(tmp_path / "cores")
    try:
        assert cores.share() == 1
    finally:
        neighbour.kill()
        neighbour.communicate()
        cores.close()


def test_a_link_put_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "cores").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=os.strerror(40)):
        HostCores(1, tmp_path / "cores")
