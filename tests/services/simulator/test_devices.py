"""Devices of a user's own: by their figures, or by what `lamella profile` measured there."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config import ModelConfig
from common.devices import A100, DEVICES, DeviceSpec
from common.errors import ConfigError
from common.model.precision import precision_of
from common.performance import FittedTime
from common.profile import machine_name, profile_path, write_profile
from common.shapes import SMOLLM2_135M
from services.simulator.config import Simulated, simulated_from_tree
from services.simulator.devices import THIS_MACHINE, device_table, read_device_file, read_devices
from services.simulator.metrics import Metrics, measure
from services.simulator.performance.files import PerformanceFileError
from services.simulator.run import Load, Offered, simulate
from tests.services.analysis.test_command import directory_with
from tests.services.simulator.performance.test_profiled import made

FIGURES = {
    "name": "mine",
    "bf16_tflops": 100,
    "memory_gb": 24,
    "memory_gb_s": 900.5,
    "price_usd_h": 0.2,
    "interchip_gb_s": 30,
    "network_gbps": 10,
    "figures_source": "its data sheet",
}
PROFILED = {"name": "mine", "profile": "profile.json", "model": "smollm2-135m", "price_usd_h": 0.2}
ROOFLINE = {"kind": "roofline"}


def pool(role: str = "mixed", **keys: Any) -> dict[str, Any]:
    return {"name": role, "role": role, "count": 1, "performance": ROOFLINE, "device": "mine"} | keys


def mesh_on(device: dict[str, Any], *pools: dict[str, Any], beside: Path = Path()) -> Simulated:
    tree = {"cluster": {"model": "smollm2-135m"}, "device": [device], "pool": list(pools)}
    return simulated_from_tree(tree, beside)


def read(table: dict[str, Any], beside: Path = Path()) -> DeviceSpec:
    catalogue = read_devices([table], beside)
    assert {**catalogue, "mine": None} == {**DEVICES, "mine": None}
    return catalogue["mine"]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "profile.json", made())
    return tmp_path


def served(simulated: Simulated, prompt: int, output: int) -> Metrics:
    """Of one request at a time."""
    offered = [Offered(100.0 * number, prompt, output) for number in range(3)]
    return measure(simulate(simulated, Load(offered)))


@pytest.mark.parametrize(("prompt", "output"), [(512, 64), (2000, 16)])
def test_a_mesh_on_a_profiled_machine_takes_about_what_its_profile_says(
    profile: Path, prompt: int, output: int
) -> None:
    """As far as a roofline can: it knows no slope over sequences, and counts attention by its products."""
    device = {**PROFILED, "memory_gb": 4}
    law = {"kind": "profile", "path": "profile.json", "by": "law"}
    roofline, by_law = (
        served(mesh_on(device, pool(performance=each), beside=profile), prompt, output)
        for each in (ROOFLINE, law)
    )
    for one, other in ((roofline.ttft, by_law.ttft), (roofline.tpot, by_law.tpot)):
        assert one is not None
        assert other is not None
        assert one.p50_s == pytest.approx(other.p50_s, rel=0.25)
    # A step of one sequence reads the weights at the rate at which the machine did.
    assert roofline.tpot is not None
    assert 0.012 < roofline.tpot.p50_s < 0.015


def test_what_a_pool_on_one_s_own_device_holds_draws_and_costs_is_by_its_figures(profile: Path) -> None:
    device = {**PROFILED, "memory_gb": 4, "power_w": 90, "network_gbps": 8}
    simulated = mesh_on(device, pool("prefill"), pool("decode", count=2), beside=profile)
    weights, token = 2 * SMOLLM2_135M.parameters, 2 * 30 * 3 * 64 * 2
    block_size = simulated.settings.instance.block_size
    assert simulated.pools[0].total_blocks == int((0.9 * 4e9 - weights) / token) // block_size
    hardware = served(simulated, 500, 50).hardware
    assert hardware.usd_h == pytest.approx(3 * 0.2)
    assert hardware.mean_w is not None
    assert 0 < hardware.mean_w < 3 * 90
    assert [each.device for each in hardware.pools] == ["mine", "mine"]
    assert hardware.pools[1].mbu == pytest.approx(1.0)
    spec = simulated.pools[0].device
    assert spec is not None
    assert (spec.network_gbps, spec.network_source) == (8, "given by the user")


def test_attention_workers_may_be_on_it() -> None:
    workers = {"name": "workers", "role": "attention", "device": "mine", "count": 2, "performance": ROOFLINE}
    decode = pool("decode", device="h100", instance={"attention_workers": 2})
    shape = {**asdict(SMOLLM2_135M), "heads": 8, "kv_heads": 2}
    tree = {
        "cluster": {"shape": shape},
        "device": [FIGURES],
        "pool": [pool("prefill"), decode, {**workers, "count": 2}],
    }
    simulated = simulated_from_tree(tree)
    assert simulated.attention is not None
    assert simulated.attention.kv_bytes == int(0.9 * 24e9)
    hardware = served(simulated, 300, 30).hardware
    assert [each.device for each in hardware.pools] == ["mine", "h100", "mine"]
    assert hardware.pools[2].usd_h == pytest.approx(2 * 0.2)


def test_the_catalogue_s_own_figures_under_another_name_are_the_same_device() -> None:
    copy = {**asdict(A100), "name": "mine"}
    assert read(copy) == replace(A100, name="mine")
    ours, theirs = (served(mesh_on(copy, pool(device=name)), 700, 20) for name in ("mine", "a100"))
    assert (ours.ttft, ours.tpot, ours.hardware.usd_h) == (theirs.ttft, theirs.tpot, theirs.hardware.usd_h)


def test_what_is_not_said_is_not_known_or_of_the_same_source() -> None:
    device = read(FIGURES)
    assert (device.power_w, device.has_reached_rates) == (None, False)
    assert {device.figures_source, device.price_source, device.network_source} == {"its data sheet"}


def test_a_device_is_read_again_as_it_was_written(profile: Path) -> None:
    for table in (FIGURES, {**FIGURES, "power_w": 70.5}, {**PROFILED, "memory_gb": 4, "power_w": 90}):
        device = read(table, profile)
        assert read(device_table(device)) == device


def test_rates_that_were_reached_are_taken_whole_unless_the_pool_says_otherwise() -> None:
    reached = {**FIGURES, "has_reached_rates": True}
    half = {"kind": "roofline", "compute": 0.5, "memory": 0.5}
    whole, peaks, halved = (
        served(mesh_on(device, pool(performance=performance)), 300, 20).tpot
        for device, performance in ((reached, ROOFLINE), (FIGURES, ROOFLINE), (reached, half))
    )
    assert whole is not None
    assert peaks is not None
    assert halved is not None
    assert whole.p50_s == pytest.approx(0.8 * peaks.p50_s, rel=0.01)
    assert whole.p50_s == pytest.approx(0.5 * halved.p50_s, rel=0.01)


def test_memory_is_this_machine_s_where_it_was_profiled_there(profile: Path) -> None:
    with pytest.raises(ConfigError, match="2 x CPU, is not this machine's processor") as caught:
        read(PROFILED, profile)
    assert (caught.value.key, caught.value.value) == ("device.mine.memory_gb", None)
    write_profile(profile / "profile.json", msgspec.structs.replace(made(), machine=machine_name()))
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert read(PROFILED, profile).memory_bytes == pytest.approx(has)


def test_this_machine_s_profile_is_found_as_instances_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = directory_with(tmp_path, {"tie_word_embeddings": False})
    monkeypatch.setenv("LAMELLA_MODEL", str(directory))
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path / "cache"))
    table = {"name": "mine", "profile": THIS_MACHINE, "price_usd_h": 0.1}
    with pytest.raises(
        ConfigError, match="tiny was not profiled on this machine: `lamella profile`"
    ) as caught:
        read(table)
    assert caught.value.key == "device.mine.profile"
    settings = ModelConfig(directory=directory, cache_directory=tmp_path / "cache")
    path = profile_path(settings, directory, precision_of(settings).compute)
    write_profile(path, msgspec.structs.replace(made(), machine=machine_name(), model="tiny"))
    device = read(table)
    assert device.has_reached_rates
    assert "`lamella profile` of tiny in bfloat16" in device.figures_source
    with pytest.raises(ConfigError, match=r"device.mine.model = 'tiny': is of a profile's file"):
        read({**table, "model": "tiny"})


@pytest.mark.parametrize(
    ("change", "key", "rule"),
    [
        ({"name": "a100"}, "device.0.name", "is in the catalogue already"),
        ({"name": "My Machine"}, "device.0.name", "small letters"),
        ({"name": None}, "device.0.name", "small letters"),
        ({"memory_gb": 0}, "device.mine.memory_gb", "must be over 0"),
        ({"bf16_tflops": -1.0}, "device.mine.bf16_tflops", "must be over 0"),
        ({"power_w": float("nan")}, "device.mine.power_w", "must be over 0"),
        ({"price_usd_h": 0.0}, "device.mine.price_usd_h", "must be over 0"),
        ({"memory_gib": 3}, "device.mine.memory_gib", "is not a known key: must be one of name, bf16_tflops"),
        ({"memory_gb": "24"}, "device.mine.memory_gb", "must be a number"),
        ({"network_gbps": None}, "device.mine.network_gbps", "must be given"),
        ({"figures_source": None}, "device.mine.figures_source", "must be given"),
    ],
)
def test_figures_that_cannot_be_are_refused_by_name(change: dict[str, Any], key: str, rule: str) -> None:
    table = {field: value for field, value in {**FIGURES, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=rule) as caught:
        read_devices([table], Path())
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("change", "key", "rule"),
    [
        ({"memory_gb": -4}, "device.mine.memory_gb", "must be over 0"),
        ({"price_usd_h": 0}, "device.mine.price_usd_h", "must be over 0"),
        ({"network_gbps": 0}, "device.mine.network_gbps", "must be over 0"),
        ({"bf16_tflops": 3}, "device.mine.bf16_tflops", "is not a known key"),
        ({"model": None}, "device.mine.model", "must say what was profiled, smollm2: a directory, or one of"),
        ({"model": "opt-12b"}, "device.mine.model", "must say what was profiled"),
    ],
)
def test_what_cannot_go_with_a_profile_is_refused_by_name(
    profile: Path, change: dict[str, Any], key: str, rule: str
) -> None:
    whole = {**PROFILED, "memory_gb": 4, **change}
    with pytest.raises(ConfigError, match=rule) as caught:
        read({field: value for field, value in whole.items() if value is not None}, profile)
    assert caught.value.key == key


def test_a_profile_that_has_no_rate_or_is_none_is_told(profile: Path) -> None:
    table = {**PROFILED, "memory_gb": 4}
    write_profile(profile / "profile.json", made(step=FittedTime((1.0, 1.0, 0.0), 0.0, 1)))
    with pytest.raises(ConfigError, match="profile again") as caught:
        read(table, profile)
    assert caught.value.key == "device.mine.profile"
    with pytest.raises(PerformanceFileError, match="cannot be read"):
        read({**table, "profile": "absent.json"}, profile)


def test_a_pool_s_unknown_device_is_told_with_all_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"must be one of a100, .*, mine, rtx-3090") as caught:
        mesh_on(FIGURES, pool(device="yours"))
    assert (caught.value.key, caught.value.value) == ("pool.mixed.device", "yours")


@pytest.mark.parametrize("tables", [{"name": "mine"}, ["mine"], 3])
def test_what_is_no_table_is_told(tables: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be \[\[device\]\] tables"):
        read_devices(tables, Path())


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device.1.name = 'mine': is another \[\[device\]\]'s already"):
        read_devices([FIGURES, FIGURES], Path())


def test_a_file_of_devices_has_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    for content in ("", "[cluster]\nmodel = 'opt-13b'\n", "[[device]]\nname = 'a'\n[space]\n"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="and nothing else"):
            read_device_file(path)
    assert read_device_file(None) is DEVICES
