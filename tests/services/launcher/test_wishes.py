"""What an operator may ask for, and what a mesh that was started so refuses."""

import pytest

from common.config import AttentionConfig, Config, InstanceConfig, PredictorConfig
from common.errors import ConfigError, LauncherError
from common.scaling import ScaledRole
from services.launcher.launch_plan import LaunchPlan
from services.launcher.wishes import (
    CountWish,
    RoleChange,
    check_possible,
    parse_wishes,
    say_change,
    wanted_counts,
)


def test_a_wish_is_a_count_or_a_change_of_it() -> None:
    wishes = parse_wishes(["prefill=2", "decode=+1", "gateway=-3"])
    assert {role: wish.count(present=4) for role, wish in wishes.items()} == {
        "prefill": 2,
        "decode": 5,
        "gateway": 1,
    }


@pytest.mark.parametrize(
    "item", ["decode", "decode=", "decode=+", "decode=1.5", "decode=+-1", "=1", "decodes=2", "decode=١"]
)
def test_what_is_no_wish_is_refused_with_what_would_be_one(item: str) -> None:
    with pytest.raises(
        ConfigError, match=r"must be ROLE=N, =\+N or =-N, of at most nine digits, of gateway, "
    ):
        parse_wishes([item])


def test_a_role_is_said_once() -> None:
    with pytest.raises(ConfigError, match="decode is said twice"):
        parse_wishes(["decode=2", "decode=+1"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (RoleChange("decode", 1, 3, ("decode-1", "decode-2")), "decode: 1 → 3 (decode-1, decode-2 ready)"),
        (RoleChange("mixed", 1, 0, (), ("mixed-0",)), "mixed: 1 → 0 (mixed-0 drained)"),
        (RoleChange("gateway", 2, 2), "gateway: 2, as before"),
    ],
)
def test_a_change_is_said_in_one_line(change: RoleChange, said: str) -> None:
    assert say_change(change) == said


def test_as_many_attention_workers_as_there_are_are_no_change() -> None:
    for workers in (0, 2):
        check_possible({"attention": workers}, LaunchPlan(attention=workers), Config())


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("decode=-5", r"^decode = '-5': there are 1, and must be 0\.\.64 instances"),
        ("decode=+64", r"^decode = '\+64': there are 1, and must be 0\.\.64"),
        ("decode=65", r"^decode = 65: must be 0\.\.64 instances"),
        ("gateway=-1", "^gateway = 0: must be at least 1"),
        ("decode=1234567890", "at most nine digits"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_in_the_words_it_was_made_in(wish: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wanted_counts(parse_wishes([wish]), {"decode": 1, "gateway": 1})


@pytest.mark.parametrize(
    ("role", "count", "plan", "config", "said"),
    [
        ("predictor", 1, LaunchPlan(), Config(), "without a length predictor"),
        ("attention", 1, LaunchPlan(), Config(), "without attention workers"),
        ("attention", 2, LaunchPlan(attention=1), Config(), "attention = 2: .* their number is fixed at 1"),
        (
            "attention",
            0,
            LaunchPlan(attention=1),
            Config(instance=InstanceConfig(attention_partition="requests")),
            "needs at least one attention worker",
        ),
        (
            "decode",
            3,
            LaunchPlan(attention=1),
            Config(attention=AttentionConfig(decode_instances=2)),
            "shared out among 2 decode instances",
        ),
    ],
)
def test_what_a_mesh_was_not_started_for_is_refused(
    role: ScaledRole, count: int, plan: LaunchPlan, config: Config, said: str
) -> None:
    with pytest.raises(LauncherError, match=said):
        check_possible({role: count}, plan, config)


def test_what_a_mesh_was_started_for_is_possible() -> None:
    instance = InstanceConfig(attention_partition="requests")
    config = Config(instance=instance, predictor=PredictorConfig(kind="history"))
    check_possible({"attention": 3, "predictor": 2, "decode": 1}, LaunchPlan(attention=1), config)
    assert CountWish(-1, is_change=True).count(present=0) == -1, "which check_counts refuses"
