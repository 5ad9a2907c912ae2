"""Plans of a local mesh that cannot be run are refused with the setting that is wrong."""

import msgspec
import pytest

from common.config import Config, InstanceConfig, Pipeline, ScalingConfig
from common.errors import ConfigError
from services.launcher.launch_plan import (
    LaunchPlan,
    check_plan,
    child_environment,
    configured,
    parse_counts,
)


def staggered(pipeline: Pipeline, batches: int = 2) -> Config:
    return Config(instance=InstanceConfig(pipeline=pipeline, staggered_batches=batches))


@pytest.mark.parametrize("pipeline", ["fixed", "rotational"])
@pytest.mark.parametrize("decode", [1, 2])
def test_batches_take_turns_in_one_decode_instance_or_in_each_of_several(
    pipeline: Pipeline, decode: int
) -> None:
    check_plan(LaunchPlan(decode=decode, attention=1), staggered(pipeline, batches=3))


@pytest.mark.parametrize("pipeline", ["fixed", "rotational"])
def test_batches_that_take_turns_need_attention_workers(pipeline: Pipeline) -> None:
    with pytest.raises(ConfigError, match=f"pipeline = '{pipeline}': needs attention workers"):
        check_plan(LaunchPlan(), staggered(pipeline))


def test_more_than_one_batch_needs_a_pipeline() -> None:
    with pytest.raises(ConfigError, match="staggered_batches = 3: needs --pipeline fixed or rotational"):
        check_plan(LaunchPlan(attention=1), staggered("off", batches=3))


def test_mixed_instances_alone_are_a_mesh_and_can_be_scaled() -> None:
    check_plan(LaunchPlan(prefill=0, decode=0, mixed=2), Config())
    assert parse_counts(["mixed=3", "decode=0"]) == {"mixed": 3, "decode": 0}
    with pytest.raises(ConfigError, match="mixed = 65"):
        check_plan(LaunchPlan(mixed=65), Config())


def test_a_partition_without_workers_is_refused() -> None:
    config = Config(instance=InstanceConfig(attention_partition="requests"))
    with pytest.raises(ConfigError, match=r"attention_partition = 'requests': needs attention workers"):
        check_plan(LaunchPlan(), config)
    check_plan(LaunchPlan(attention=2), config)


def test_attention_workers_keep_memory_for_decode_instances_that_may_come() -> None:
    config = Config(instance=InstanceConfig(attention_partition="requests"))
    plan = LaunchPlan(decode=2, attention=1)
    assert configured(config, plan).attention.decode_instances == 2
    for policy, shares in (("on", 5), ("dry_run", 2)):
        scaling = msgspec.convert({"policy": policy, "max_decode": 5}, ScalingConfig)
        growing = msgspec.structs.replace(config, scaling=scaling)
        assert configured(growing, plan).attention.decode_instances == shares


@pytest.mark.parametrize("variable", ["NATS_URL", "NATS_URL_FILE", "REDIS_URL_FILE"])
def test_a_service_takes_its_servers_from_the_meshs_file_only(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "of another mesh")
    assert variable not in child_environment(Config(), "decode-0", 0)
