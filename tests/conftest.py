"""What every test may ask for: a real nats-server, a real Redis-compatible server, a namespace of its own."""

import os

# Before anything imports torch: it reads these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# What a developer has compiled is not what is tested, but where a test says so.
os.environ.setdefault("LAMELLA_COMPILED", "")

import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from services.launcher import embedded

if TYPE_CHECKING:
    from tests.common.model.conftest import MakeTiny

# How long an example takes says how busy the machine is, and nothing of what is tested.
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

# In the background of a script SIGINT is ignored, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.two_workers import TwoWorkers

    return TwoWorkers(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_worker(config):
        from tests.two_workers import meshes_first

        meshes_first(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if is_worker(item.config):
        from tests.two_workers import give_way_to_meshes

        give_way_to_meshes(item.nodeid)


def is_worker(config: pytest.Config) -> bool:
    """One of several, of pytest-xdist."""
    return hasattr(config, "workerinput")


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A nats-server for the whole run. Tests that restart it start their own."""
    yield from _running(embedded.prepare_nats(tmp_path_factory.mktemp("nats")))


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey for the whole run. Tests that restart or flush it start their own."""
    yield from _running(embedded.prepare_redis(tmp_path_factory.mktemp("redis")))


@pytest.fixture(scope="session", autouse=True)
def patient_store() -> Iterator[None]:
    """Tests look into a store that is there: a machine that does much else may be slow to answer."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OPERATION_TIMEOUT_S", "CONNECT_TIMEOUT_S"):
            patch.setattr(f"common.store.{name}", 20.0)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> "MakeTiny":
    """Makes a family's tiny model, once for all tests: capturing takes seconds."""
    # Only now: it imports torch, which most tests do without.
    from tests.common.model.conftest import tiny_models

    return tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def namespace() -> str:
    """Subjects and keys of one test; never shared with another."""
    return f"t-{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def shared_directory() -> Path:
    """Papers, traces and other material beside the repository; skips loudly where there is none."""
    default = Path(__file__).resolve().parents[2] / "shared"
    directory = Path(os.environ.get("LAMELLA_SHARED", default))
    if not directory.is_dir():
        pytest.skip("no shared material: set LAMELLA_SHARED to its directory")
    return directory


def _running(server: embedded.EmbeddedServer) -> Iterator[str]:
    process = embedded.start(server)
    try:
        yield server.url
    finally:
        embedded.stop(process)
