"""Settings fail at start, naming key, value and rule."""

import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config
from common.config_file import ENVIRONMENT, config_from_tree, load_config, load_named_servers, to_toml
from common.errors import ConfigError

BROKEN = [
    ({"instance": {"blok_size": 1}}, "instance.blok_size = 1: is not a known key: did you mean block_size?"),
    ({"instnce": {}}, "instnce = {}: is not a known key: did you mean instance?"),
    ({"instance": {"block_size": "x"}}, "instance.block_size = 'x': must be a whole number"),
    ({"instance": {"block_size": 0}}, "instance.block_size = 0: must be at least 1"),
    ({"instance": {"role": "boss"}}, "instance.role = 'boss': must be one of 'prefill', 'decode'"),
    (
        {"scaling": {"policy": "on"}, "roles": {"policy": "overflow"}},
        "scaling.policy = 'on': on needs roles.policy = 'fixed', as both change counts: it is 'overflow'",
    ),
    (
        {"scaling": {"min_decode": 5}},
        "scaling.max_decode = 4: must be at least scaling.min_decode = 5",
    ),
    ({"scaling": {"utilisation": 1.0}}, "scaling.utilisation = 1.0: must be over 0 and under 1"),
    ({"mesh": {"lease_s": 1.0}}, "mesh.lease_s = 1.0: must be at least 2 x mesh.heartbeat_s = 2.0"),
    ({"mesh": {"namespace": "A b"}}, "mesh.namespace = 'A b': must match"),
    ({"service": {"port": 70_000}}, "service.port = 70000: must be 0..65535"),
    (
        {"service": {"port": 8000}, "gateway": {"private_port": 8000}},
        "gateway.private_port = 8000: must not be service.port",
    ),
    (
        {"transfer": {"min_port": 9, "max_port": 9}},
        "transfer.max_port = 9: must be over transfer.min_port = 9",
    ),
    (
        {"transfer": {"path": "shared_memory", "protocol": "rdma"}},
        "transfer.path = 'shared_memory': shared_memory needs transfer.protocol = 'tcp': it is 'rdma'",
    ),
    ({"attention": {"device": "tpu"}}, "attention.device = 'tpu': must be cpu, cuda or cuda:N"),
    (
        {"attention": {"device": "cuda:1"}, "transfer": {"path": "shared_memory"}},
        "attention.device = 'cuda:1': must be cpu with transfer.path = 'shared_memory'",
    ),
    ({"mesh": 3}, "mesh = 3: must be a table"),
    ({"mesh": {"lease_s": float("inf")}}, "mesh.lease_s = inf: must be a finite number"),
    ({"mesh": {"heartbeat_s": float("nan")}}, "mesh.heartbeat_s = nan: must be a finite number"),
    ({"mesh": {"call_timeout_s": 0}}, "mesh.call_timeout_s = 0.0: must be over 0"),
    ({"model": {"directory": 3}}, "model.directory = 3: must be the text of a path"),
    ({"model": {"directory": ""}}, "model.directory = '': must be the text of a path"),
    ({"gateway": {"tokenizer_threads": 0}}, "gateway.tokenizer_threads = 0: must be at least 1"),
    ({"gateway": {"max_continuations": -1}}, "gateway.max_continuations = -1: must be 0 or more"),
    ({"emulation": {"vocab_size": 0}}, "emulation.vocab_size = 0: must be at least 1"),
    ({"emulation": {"decode_base_s": -1}}, "emulation.decode_base_s = -1.0: must be 0 or more"),
    ({"transfer": {"min_port": 0}}, "transfer.min_port = 0: must be 1..65535"),
    ({"transfer": {"max_port": 70_000}}, "transfer.max_port = 70000: must be 1..65535"),
    (
        {"transfer": {"emulated_bandwidth_bytes_per_s": 0}},
        "transfer.emulated_bandwidth_bytes_per_s = 0.0: must be over 0",
    ),
    (
        {"scheduler": {"decode_policy": "nosuch"}},
        "scheduler.decode_policy = 'nosuch': must be one of 'round_robin', 'least_outstanding',",
    ),
    (
        {"instance": {"staggered_batches": 1}},
        "instance.staggered_batches = 1: must be 2..16: n batches take turns",
    ),
    (
        {"instance": {"staggered_batches": 4, "replica_devices": ["cpu", "cpu"]}},
        "instance.replica_devices = ['cpu', 'cpu']: must be none, or a device for each model replica (with"
        " pipeline = 'fixed' as many as instance.staggered_batches, else one less), the first of them"
        " model.device: 3, beginning with 'cpu'",
    ),
    (
        {"instance": {"pipeline": "fixed", "replica_devices": ["cpu"]}},
        "the first of them model.device: 2, beginning with 'cpu'",
    ),
    (
        {"instance": {"replica_devices": ["cuda:1"]}},
        "the first of them model.device: 1, beginning with 'cpu'",
    ),
    ({"scheduler": {"shadow_share": 0.5}}, "scheduler.shadow_share = 0.5: must be 0..0.1"),
    ({"objectives": {"ttft_s": 0}}, "objectives.ttft_s = 0.0: must be finite and over 0"),
    (
        {"service_classes": {"batch": {"tpot_s": -1}}},
        "service_classes.batch.tpot_s = -1.0: must be finite and over 0",
    ),
    (
        {"service_classes": {"batch": {"head_start_s": float("inf")}}},
        "service_classes.batch.head_start_s = inf: must be a finite number",
    ),
    (
        {"service_classes": {"gold": {"ttft_s": 1}, "batch": {"tpot": 1}}},
        "service_classes.batch.tpot = 1: is not a known key: did you mean tpot_s?",
    ),
    (
        {"service_classes": {"gold": {"ttft_s": 1}, "batch": {"ttft_s": "soon"}}},
        "service_classes.batch.ttft_s = 'soon': must be a number",
    ),
    ({"service_classes": {"gold": 1}}, "service_classes.gold = 1: must be a table"),
    ({"roles": {"overflow_kv_share": 2}}, "roles.overflow_kv_share = 2.0: must be over 0 and at most 1"),
    ({"model": {"threads": 100_000}}, "model.threads = 100000: must be at most 1024"),
    ({"service": {"host": ""}}, "service.host = '': must name a host"),
    ({"scheduler": {"grouped": 1}}, "scheduler.grouped = 1: must be true or false"),
    ({"instance": {"block_size": "16"}}, "instance.block_size = '16': must be a whole number"),
    ({"mesh": {"nats_url": "http://x:1"}}, "mesh.nats_url = 'http://x:1': must begin with nats:// or tls://"),
    (
        {"mesh": {"nats_url": "http://me:p@ss@x:1"}},
        "mesh.nats_url = 'http://...@x:1': must begin with nats:// or tls://",
    ),
    (
        {"mesh": {"redis_url": "x:1"}},
        "mesh.redis_url = 'x:1': must begin with redis:// or rediss:// or unix://",
    ),
    ({"service_classes": {"Batch": {}}}, "service_classes.Batch = 'Batch': must match [a-z0-9-]{1,64}"),
    ({"service_classes": {"default": {}}}, "default is what [objectives] says"),
    ({"service_classes": {f"c{number}": {} for number in range(17)}}, "must be at most 16"),
    ({"transfer": {"emulated_latency_s": -1}}, "transfer.emulated_latency_s = -1.0: must be 0 or more"),
]


@pytest.mark.parametrize(("tree", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_setting_is_named_with_its_value_and_its_rule(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from_tree(tree)
    assert message in str(refused.value)


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    with pytest.raises(ConfigError, match=r"is not a known key$"):
        config_from_tree({"xyz": {}})


def test_a_configuration_survives_being_written_and_read(tmp_path: Path) -> None:
    config = config_from_tree(
        {
            "mesh": {"namespace": "blue"},
            "model": {"directory": '/models/with "quotes"', "dtype": "fp32"},
            "instance": {"block_size": 1, "prefill_order": "ljf"},
            "transfer": {"emulated_bandwidth_bytes_per_s": 1.5e9},
            "service_classes": {"gold": {"ttft_s": 0.25, "end_to_end_s": 9.0}, "bulk": {}},
        }
    )
    path = tmp_path / "mesh.toml"
    path.write_text(to_toml(config))
    assert load_config(path, {}) == config


@given(
    directory=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1),
    lease_s=st.floats(2.0, 1e300),
    kv_bytes=st.integers(1, 1 << 60),
)
def test_any_values_survive_being_written_as_toml(directory: str, lease_s: float, kv_bytes: int) -> None:
    config = config_from_tree(
        {
            "model": {"directory": directory},
            "mesh": {"lease_s": lease_s},
            "instance": {"kv_bytes": kv_bytes},
        }
    )
    assert config_from_tree(tomllib.loads(to_toml(config))) == config


def test_no_class_of_service_survives_being_written_too() -> None:
    config = config_from_tree({"service_classes": {}})
    assert config_from_tree(tomllib.loads(to_toml(config))) == config != Config()


def test_the_environment_stands_over_the_file_and_is_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[service]\nport = 1\n[mesh]\nnamespace = "file"\n')
    config = load_config(path, {"LAMELLA_PORT": "2", "OTHER": "x"})
    assert (config.service.port, config.mesh.namespace) == (2, "file")
    with pytest.raises(ConfigError, match=r"service\.port = 'many'"):
        load_config(path, {"LAMELLA_PORT": "many"})
    path.write_text('[service]\nport = "1"\n')
    with pytest.raises(ConfigError, match=r"service\.port = '1': must be a whole number"):
        load_config(path, {"LAMELLA_PORT": "2"})


def test_servers_are_named_by_file_or_environment_though_they_are_the_default_ones(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[mesh]\nnats_url = "nats://127.0.0.1:4222"\n')
    assert load_named_servers(path, {}) == ("nats://127.0.0.1:4222", None)
    elsewhere = {"NATS_URL": "nats://elsewhere", "REDIS_URL": "redis://elsewhere"}
    assert load_named_servers(path, elsewhere) == ("nats://elsewhere", "redis://elsewhere")
    assert load_named_servers(None, {}) == (None, None)


def test_every_variable_sets_a_key_that_exists() -> None:
    for section, key in ENVIRONMENT.values():
        assert key in getattr(Config(), section).__struct_fields__


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml", {})
    for content in (b"[mesh", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ConfigError, match="is not TOML"):
            load_config(tmp_path / "bad.toml", {})


def test_a_section_that_is_no_table_is_named_though_the_environment_sets_a_key_of_it(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("service = 3\n")
    with pytest.raises(ConfigError, match="service = 3: must be a table"):
        load_config(path, {"LAMELLA_PORT": "2"})


def test_a_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        Config().mesh.namespace = "other"  # type: ignore[misc]  # that is the point
    assert msgspec.structs.replace(Config().mesh, namespace="other").namespace == "other"
