"""What `lamella profile --operators` measures at which sizes, with which clock, and between whom."""

import pytest
import torch

from common.errors import ConfigError
from common.shapes import SMOLLM2_135M
from services.profiling.operators.communication import (
    CommunicationError,
    check_participants,
    measure_messages,
)
from services.profiling.operators.laps import HostLaps, statistics_of
from services.profiling.operators.message_worker import Messages
from services.profiling.operators.profiling import parse_degrees
from services.profiling.operators.sizes import (
    Effort,
    Limits,
    chunk_cases,
    message_sizes,
    shard_of,
    step_cases,
    token_counts,
)


def test_messages_need_a_device_each_where_there_are_devices() -> None:
    check_participants(torch.device("cpu"), (2, 64))
    there = torch.cuda.device_count()
    said = (
        rf"--tp = {there + 2}: .* need as many CUDA devices, .* has {there}: .*communication = \"roofline\""
    )
    with pytest.raises(ConfigError, match=said):
        check_participants(torch.device("cuda"), (2, there + 2))


def test_a_process_that_fails_ends_the_measurement() -> None:
    """gloo adds no numbers of eight bits."""
    with pytest.raises(CommunicationError):
        measure_messages(
            [Messages("all_reduce", 2, (512,))],
            torch.float8_e4m3fn,
            torch.device("cpu"),
            Effort(1, 10.0),
            lambda part: None,
        )


def test_a_lap_that_comes_twice_counts_with_the_sum() -> None:
    laps = HostLaps()
    for _ in range(2):
        laps.begin()
        for operator in ("add", "norm", None, "add"):
            laps.mark(operator)
    runs = laps.taken_ms()
    assert [sorted(run) for run in runs] == [["add", "norm"]] * 2
    assert all(ms >= 0 for run in runs for ms in run.values())
    assert laps.taken_ms() == []
    columns = statistics_of("add", [3.0, 1.0, 2.0])
    assert columns["time_stats.add.median"] == columns["time_stats.add.mean"] == 2
    assert (columns["time_stats.add.min"], columns["time_stats.add.max"]) == (1, 3)


def test_sizes_are_what_the_limits_allow() -> None:
    shard = shard_of(SMOLLM2_135M, 3)
    limits = Limits(tokens=100, context=1 << 20, batch=64)
    assert token_counts(limits)[:5] == (1, 2, 3, 4, 6)
    assert token_counts(limits)[-2:] == (91, 100)
    assert all(before + tokens <= limits.context for before, tokens in chunk_cases(limits))
    assert (64, 1 << 20) not in step_cases(shard, limits, 2), "64 GiB of KV"
    assert (1, 1 << 20) in step_cases(shard, limits, 2)
    assert message_sizes(1) == (512, 1024)
    assert parse_degrees("4,1,2,1") == (1, 2, 4)
    for bad in ("", "1;2", "two"):
        with pytest.raises(ConfigError, match="--tp = "):
            parse_degrees(bad)
    with pytest.raises(ConfigError, match="max-batch = 1: must be at least 2"):
        Limits(batch=1)
