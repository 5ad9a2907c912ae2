"""Settings fail at start, naming key, value and rule."""

from pathlib import Path

import msgspec
import pytest

from common.config import ENVIRONMENT, Config, config_from_tree, load_config, to_toml
from common.errors import ConfigError

BROKEN = [
    ({"instance": {"blok_size": 1}}, "instance.blok_size = 1: is not a known key"),
    ({"instances": {}}, "instances = {}: is not a known key"),
    ({"instance": {"block_size": "x"}}, "instance.block_size = 'x': Expected `int`, got `str`"),
    ({"instance": {"block_size": 0}}, "instance.block_size = 0: must be at least 1"),
    ({"instance": {"role": "boss"}}, "instance.role = 'boss': Invalid enum value 'boss'"),
    ({"mesh": {"lease_s": 1.0}}, "mesh.lease_s = 1.0: must be at least 2 x mesh.heartbeat_s = 2.0"),
    ({"mesh": {"namespace": "A b"}}, "mesh.namespace = 'A b': must match"),
    ({"service": {"port": 70_000}}, "service.port = 70000: must be 0..65535"),
    (
        {"transfer": {"min_port": 9, "max_port": 9}},
        "transfer.max_port = 9: must be over transfer.min_port = 9",
    ),
    (
        {"transfer": {"path": "shared_memory", "protocol": "rdma"}},
        "transfer.path = 'shared_memory': shared_memory cannot be combined with transfer.protocol = 'rdma'",
    ),
    ({"transfer": {"emulated_latency_s": -1}}, "transfer.emulated_latency_s = -1.0: must be 0 or more"),
]


@pytest.mark.parametrize(("tree", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_setting_is_named_with_its_value_and_its_rule(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from_tree(tree)
    assert message in str(refused.value)


def test_a_configuration_survives_being_written_and_read(tmp_path: Path) -> None:
    config = config_from_tree(
        {
            "mesh": {"namespace": "blue"},
            "model": {"directory": '/models/with "quotes"', "dtype": "fp32"},
            "instance": {"block_size": 1, "prefill_order": "ljf"},
            "transfer": {"emulated_bandwidth_bytes_per_s": 1.5e9},
        }
    )
    path = tmp_path / "mesh.toml"
    path.write_text(to_toml(config))
    assert load_config(path, {}) == config


def test_the_environment_stands_over_the_file_and_is_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[service]\nport = 1\n[mesh]\nnamespace = "file"\n')
    config = load_config(path, {"LAMELLA_PORT": "2", "OTHER": "x"})
    assert (config.service.port, config.mesh.namespace) == (2, "file")
    with pytest.raises(ConfigError, match=r"service\.port = 'many'"):
        load_config(path, {"LAMELLA_PORT": "many"})


def test_every_variable_sets_a_key_that_exists() -> None:
    for section, key in ENVIRONMENT.values():
        assert key in getattr(Config(), section).__struct_fields__


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml", {})
    (tmp_path / "bad.toml").write_text("[mesh")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(tmp_path / "bad.toml", {})


def test_a_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        Config().mesh.namespace = "other"  # type: ignore[misc]  # that is the point
    assert msgspec.structs.replace(Config().mesh, namespace="other").namespace == "other"
