"""What instances take from a machine's profile beside its times: simulated ones take it, too."""

from pathlib import Path

import msgspec
import pytest

from common.config import TransferConfig
from common.performance import DEFAULT_CHUNK_TOKENS
from common.profile import HandOverTimes, link_of, write_profile
from tests.services.simulator.meshes import mesh, pool, run
from tests.services.simulator.performance.test_profiled import made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a machine that 256 tokens saturate, where layer by layer was better from 128 on."""
    times = HandOverTimes(
        link=link_of(TransferConfig()), until_second_s=((128, 0.2, 0.1),), layerwise_min_tokens=128
    )
    write_profile(tmp_path / "profile.json", msgspec.structs.replace(made(), hand_over=times))
    return tmp_path / "profile.json"


def test_chunks_are_as_long_as_live(path: Path) -> None:
    profiled = pool("mixed", performance={"kind": "profile", "path": str(path)})
    found = run(mesh(profiled), (0.0, 1000, 2))
    assert [engine.work.passes for engine in (live.engine for live in found.lives)] == [4 + 1]
    wider = run(mesh(profiled, instance={"chunk_tokens": 512}), (0.0, 1000, 2))
    assert wider.lives[0].engine.work.passes == 2 + 1
    assert run(mesh(pool("mixed")), (0.0, DEFAULT_CHUNK_TOKENS, 2)).lives[0].engine.work.passes == 1 + 1


def test_hand_overs_are_layer_by_layer_from_where_that_was_better_over_such_a_link(path: Path) -> None:
    profiled = pool("prefill", performance={"kind": "profile", "path": str(path)})
    taken = mesh(profiled, pool("decode")).pools[0].settings.transfer
    assert taken.layerwise_min_tokens == 128
    own = mesh(profiled, pool("decode"), transfer={"layerwise_min_tokens": 64}).pools[0].settings.transfer
    assert own.layerwise_min_tokens == 64
    slow = {"emulated_bandwidth_bytes_per_s": 1e6}
    other = mesh(profiled, pool("decode"), transfer=slow).pools[0].settings.transfer
    assert other.layerwise_min_tokens is None
