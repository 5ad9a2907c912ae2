"""What the doctor says of a machine that looks so and so."""

from pathlib import Path

import pytest

from common.config import TransferConfig
from services.doctor.child import ChildAnswer, TorchDevices
from services.doctor.hardware import judge_gpu, judge_rdma, rdma_ports
from services.doctor.machine import FEWEST_FILES, judge_memory, judge_open_files
from services.doctor.servers import judge_transfer_ports
from services.doctor.software import judge_mooncake, unmet

GIB = 1 << 30
CPU_BUILD = TorchDevices("2.13.0+cpu", None, [], [])
CUDA_BUILD = TorchDevices("2.13.0+cu130", "13.0", [], [])
ONE_CARD = TorchDevices("2.13.0+cu130", "13.0", ["H200"], [141 * GIB])


def test_memory_that_two_instances_may_fill_is_worth_a_note() -> None:
    assert judge_memory(8 * GIB, GIB).verdict == "good"
    found = judge_memory(3 * GIB, GIB)
    assert found.verdict == "note"
    assert "two instances may take 4.0 GiB" in found.seen


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "advice"),
    [
        (65_536, 65_536, "good", None),
        (-1, -1, "good", None),
        (1024, 65_536, "note", "`ulimit -n 2304` before"),
        (1024, 2048, "note", "`ulimit -Hn 2304` as root"),
        (FEWEST_FILES - 1, -1, "problem", "`ulimit -n 2304` before"),
    ],
)
def test_too_few_open_files_are_raised_by_whoever_may(
    soft: int, hard: int, verdict: str, advice: str | None
) -> None:
    found = judge_open_files(soft, hard, open_requests=2048)
    assert found.verdict == verdict
    assert (advice or "") in (found.advice or "")
    assert (found.advice is None) == (advice is None)


@pytest.mark.parametrize(
    ("torch", "has_driver", "wanted", "verdict", "words"),
    [
        (CPU_BUILD, False, [], "good", "computes on the CPU"),
        (CPU_BUILD, False, ["cuda"], "problem", "none, and the settings ask for cuda"),
        (CPU_BUILD, True, [], "note", "built for CPUs"),
        (CPU_BUILD, True, ["cuda"], "problem", "built for CPUs"),
        (CUDA_BUILD, True, ["cuda"], "problem", "cannot use it"),
        (ONE_CARD, True, [], "note", "H200 (141.0 GiB); unused"),
        (ONE_CARD, True, ["cuda", "cuda:0"], "good", "used: cuda, cuda:0"),
        (ONE_CARD, True, ["cuda", "cuda:1"], "problem", "there is no cuda:1: torch sees 1"),
    ],
)
def test_a_gpu_is_a_problem_only_where_the_settings_ask_for_it(
    torch: TorchDevices, has_driver: bool, wanted: list[str], verdict: str, words: str
) -> None:
    found = judge_gpu(torch, has_driver, wanted)
    assert (found.verdict, words in found.seen) == (verdict, True), found
    assert (found.advice is None) == (verdict == "good")


@pytest.mark.parametrize(
    ("states", "is_wanted", "verdict", "words"),
    [
        ({}, False, "good", "no card"),
        ({}, True, "problem", "there is no card"),
        ({"mlx5_0/ports/1": "4: ACTIVE"}, True, "good", "active: mlx5_0 port 1"),
        ({"mlx5_0/ports/1": "4: ACTIVE"}, False, "note", "unused"),
        ({"mlx5_0/ports/1": "1: DOWN"}, False, "note", "mlx5_0 port 1 is 1: DOWN"),
        ({"mlx5_0/ports/1": "1: DOWN", "mlx5_1/ports/2": "2: INIT"}, True, "problem", "mlx5_1 port 2"),
    ],
)
def test_rdma_needs_a_port_that_is_active(
    tmp_path: Path, states: dict[str, str], is_wanted: bool, verdict: str, words: str
) -> None:
    """The kernel's tree, as it lies below /sys/class/infiniband."""
    for port, state in states.items():
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(f"{state}\n")
    found = judge_rdma(rdma_ports(tmp_path), is_wanted=is_wanted)
    assert (found.verdict, words in found.seen) == (verdict, True), found


def test_ports_that_the_kernel_gives_out_are_no_ports_for_mooncake() -> None:
    outside = TransferConfig(min_port=20_000, max_port=32_000)
    assert judge_transfer_ports(outside, 32_768, 60_999).verdict == "good"
    assert judge_transfer_ports(outside, 32_000, 60_999).verdict == "note"
    needed = TransferConfig(path="mooncake", min_port=20_000, max_port=40_000)
    assert judge_transfer_ports(needed, 32_768, 60_999).verdict == "problem"


def test_mooncake_that_cannot_be_loaded_is_a_problem_where_it_is_needed() -> None:
    """Each advice is read by itself, in ``--json``."""
    absent = ChildAnswer(False, "libibverbs.so.1: cannot open shared object file")
    needed = judge_mooncake(absent, TransferConfig(path="mooncake"))
    assert needed.verdict == "problem"
    assert needed.advice is not None
    assert needed.advice.startswith("install what it lacks; on one machine leave")
    assert judge_mooncake(absent, TransferConfig()).verdict == "note"
    assert judge_mooncake(ChildAnswer(True, "loaded"), TransferConfig(path="mooncake")).verdict == "good"


def test_packages_of_extras_and_of_other_systems_are_not_missed() -> None:
    requirements = [
        "msgspec>=0.22",
        "no-such-package>=1",
        "msgspec<0.1",
        "no-such-extra>=1; extra == 'dev'",
        "no-such-system>=1; sys_platform == 'win32'",
    ]
    missing, old = unmet(requirements)
    assert missing == "no-such-package is not installed"
    assert old.startswith("msgspec is ")
    assert old.endswith("not <0.1")
