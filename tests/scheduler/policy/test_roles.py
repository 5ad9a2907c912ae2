"""Which instance changes its role: when a pool overflows, when it is relieved, when one idles."""

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import RolesConfig
from common.ids import InstanceId
from common.messages import Role, has_phase
from scheduler.policy.roles import OPPOSITE, IdleFlip, Overflow, RoleChange, Worker, role_policy

SETTINGS = RolesConfig(
    policy="overflow",
    cool_down_s=2.0,
    overflow_queue_s=1.0,
    overflow_queue_tokens=1000,
    overflow_kv_share=0.8,
    settle_s=5.0,
    repurpose_s=60.0,
)
IDLE = RolesConfig(policy="idle_flip", look_s=1.0, idle_s=10.0)


def worker(name: str, role: Role | None = None, **load: float | None) -> Worker:
    """``p…`` is at home in prefill, ``d…`` in decode. ``load``: fields of a Worker."""
    home: Role = "prefill" if name[0] == "p" else "decode"
    idle = Worker(InstanceId(name), role or home, home, 0, 0.0, 0, 0.0, 0, 0)
    return replace(idle, **load)  # type: ignore[arg-type]  # counts are whole


def changed(change: RoleChange | None) -> tuple[str, Role, bool] | None:
    return None if change is None else (change.instance_id, change.role, change.keeps_home)


BUSY_PREFILL = worker("p0", queue_s=3.0, prompts=9)
FULL_DECODE = worker("d0", kv_share=0.9, decodes=9)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        # Nobody has too much.
        ([worker("p0", queue_s=0.9), worker("d0"), worker("d1")], None),
        # The least loaded decode instance helps.
        ([BUSY_PREFILL, worker("d0", kv_share=0.5), worker("d1", kv_share=0.2)], ("d1", "mixed", True)),
        # One prefill instance has room: there the next prompt goes.
        ([BUSY_PREFILL, worker("p1"), worker("d0"), worker("d1")], None),
        # A mixed one has room.
        ([BUSY_PREFILL, worker("d0", "mixed"), worker("d1"), worker("d2")], None),
        # The mixed one is full, too.
        (
            [BUSY_PREFILL, worker("d0", "mixed", queue_s=2.0), worker("d1"), worker("d2")],
            ("d1", "mixed", True),
        ),
        # The last of its kind stays, and so does one that is full itself.
        ([BUSY_PREFILL, worker("d0")], None),
        ([BUSY_PREFILL, FULL_DECODE, worker("d1", waiting=1)], None),
        # Before anything is known of times, tokens count.
        ([worker("p0", queue_s=None, queue_tokens=1001), worker("d0"), worker("d1")], ("d0", "mixed", True)),
        # Decode's memory is full, or somebody waits for it everywhere.
        ([FULL_DECODE, worker("p0", queue_s=0.5), worker("p1", queue_s=0.1)], ("p1", "mixed", True)),
        ([worker("d0", waiting=1), worker("p0"), worker("p1")], ("p0", "mixed", True)),
        ([FULL_DECODE, worker("d1"), worker("p0"), worker("p1")], None),
        # Nobody prefills at all: that is not an overflow, and may be over in a moment.
        ([worker("d0"), worker("d1")], None),
    ],
)
def test_who_helps_where_a_pool_overflows(
    workers: list[Worker], expected: tuple[str, Role, bool] | None
) -> None:
    assert changed(Overflow(SETTINGS).decide(workers, 0.0)) == expected


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker("d0"), worker("d1", kv_share=0.2)], ("d0", "mixed", True)),
        # The last of its kind, and full.
        ([replace(FULL_DECODE, waiting=3)], ("d0", "mixed", True)),
        ([BUSY_PREFILL, worker("p1", queue_s=4.0)], ("p0", "mixed", True)),
        ([], None),
    ],
)
def test_a_role_that_nobody_has_is_taken_over_by_one_of_the_other_kind(
    workers: list[Worker], expected: tuple[str, Role, bool] | None
) -> None:
    policy = Overflow(SETTINGS)
    assert policy.decide([worker("p0"), worker("d0")], -1.0) is None
    assert policy.decide(workers, 0.0) is None
    assert policy.decide(workers, SETTINGS.replace_after_s - 0.1) is None
    assert changed(policy.decide(workers, SETTINGS.replace_after_s)) == expected


def test_a_role_that_nobody_has_had_yet_is_waited_for() -> None:
    policy = Overflow(SETTINGS)
    for second in range(20):
        assert policy.decide([worker("d0"), worker("d1")], float(second)) is None


def test_a_role_that_nobody_has_for_a_moment_is_not_taken_over() -> None:
    policy = Overflow(SETTINGS)
    for second in range(20):
        there = [worker("p0")] if second % 4 == 0 else []
        assert policy.decide([*there, worker("d0"), worker("d1")], float(second)) is None


def test_who_took_a_role_over_goes_home_once_somebody_has_it_again() -> None:
    policy = Overflow(replace_settings(cool_down_s=0.0))
    policy.decide([worker("p0"), worker("d0")], -1.0)
    policy.decide([worker("d0")], 0.0)
    assert changed(policy.decide([worker("d0")], 5.0)) == ("d0", "mixed", True)
    guest = worker("d0", "mixed", prompts=1)
    assert policy.decide([guest], 6.0) is None
    assert policy.decide([worker("p0"), guest], 7.0) is None
    assert changed(policy.decide([worker("p0"), replace(guest, prompts=0)], 8.0)) == ("d0", "decode", True)


def test_a_change_says_which_of_its_settings_asked_for_it() -> None:
    relieved = Overflow(replace_settings(cool_down_s=0.0))
    stayed = Overflow(replace_settings(cool_down_s=0.0))
    stays = [BUSY_PREFILL, worker("d0", "mixed", queue_s=2.0), worker("d1")]
    stayed.decide(stays, 0.0)
    idle = IdleFlip(IDLE)
    loaded = [worker("p0", prompts=1), worker("d0"), worker("d1")]
    changes = [
        Overflow(SETTINGS).decide([BUSY_PREFILL, worker("d0"), worker("d1")], 0.0),
        Overflow(SETTINGS).decide(
            [worker("p0", queue_s=None, queue_tokens=1001), worker("d0"), worker("d1")], 0.0
        ),
        Overflow(SETTINGS).decide([FULL_DECODE, worker("p0"), worker("p1")], 0.0),
        Overflow(SETTINGS).decide([worker("d0", waiting=1), worker("p0"), worker("p1")], 0.0),
        relieved.decide([worker("p0"), worker("d0", "mixed"), worker("d1")], 0.0),
        stayed.decide(stays, 60.0),
        [idle.decide(loaded, look) for look in range(10)][-1],
    ]
    least = "even the least loaded of those that"
    assert [None if each is None else each.reason for each in changes] == [
        f"{least} prefill has 3.0 s of prompts waiting, roles.overflow_queue_s = 1",
        f"{least} prefill has 1001 tokens of prompts waiting, roles.overflow_queue_tokens = 1000",
        f"{least} decode has 90% of its KV memory taken, roles.overflow_kv_share = 0.8",
        f"{least} decode has sequences that wait for room",
        "prefill is under roles.return_share = 0.5 of its bound; 0 requests of it are left here",
        "prefill has needed its help for 60 s, roles.repurpose_s = 60",
        "busy for 0% of 10 s, roles.idle_share = 0.1; all that prefill for 100%, roles.loaded_share = 0.5",
    ]


def test_a_helper_returns_home_when_its_share_is_done_and_the_queues_are_short() -> None:
    policy = Overflow(SETTINGS)
    decode = worker("d1")
    assert changed(policy.decide([BUSY_PREFILL, worker("d0"), decode], 0.0)) == ("d0", "mixed", True)
    guest = worker("d0", "mixed", prompts=2, queue_s=0.4)
    # Under the bound is not enough: half of it is.
    assert policy.decide([worker("p0", queue_s=0.6), guest, decode], 10.0) is None
    assert policy.decide([worker("p0", queue_s=0.4), guest, decode], 11.0) is None
    done = replace(guest, prompts=0)
    assert changed(policy.decide([worker("p0", queue_s=0.4), done, decode], 12.0)) == ("d0", "decode", True)


def test_a_helper_to_whom_work_trickles_returns_all_the_same_once_the_queues_stay_short() -> None:
    policy = Overflow(SETTINGS)
    workers = [worker("p0"), worker("d0", "mixed", prompts=1), worker("d1")]
    assert policy.decide(workers, 0.0) is None
    assert policy.decide([BUSY_PREFILL, *workers[1:]], 4.0) is None
    assert policy.decide(workers, 5.0) is None
    assert policy.decide(workers, 9.9) is None
    assert changed(policy.decide(workers, 10.0)) == ("d0", "decode", True)


def test_one_that_is_needed_for_long_changes_its_home_unless_it_is_the_last() -> None:
    for others, expected in (((worker("d1"),), ("d0", "prefill", False)), ((), None)):
        policy = Overflow(replace_settings(cool_down_s=0.0))
        workers = [BUSY_PREFILL, worker("d0", "mixed", queue_s=2.0, prompts=3), *others]
        policy.decide(workers, 0.0)
        assert changed(policy.decide(workers, 59.9)) is None
        assert changed(policy.decide(workers, 60.0)) == expected


def test_after_a_change_there_is_none_for_a_while() -> None:
    policy = Overflow(SETTINGS)
    workers = [BUSY_PREFILL, worker("d0"), worker("d1"), worker("d2")]
    assert changed(policy.decide(workers, 0.0)) == ("d0", "mixed", True)
    workers[1] = worker("d0", "mixed", queue_s=2.0, prompts=3)
    assert policy.decide(workers, 1.9) is None
    assert changed(policy.decide(workers, 2.0)) == ("d1", "mixed", True)


def test_an_instance_that_is_mixed_by_itself_stays_so() -> None:
    mixed = replace(worker("d0", "mixed"), home="mixed")
    assert Overflow(SETTINGS).decide([worker("p0"), mixed, worker("d1")], 0.0) is None


def test_one_that_idles_for_a_minute_while_the_others_work_flips() -> None:
    policy = IdleFlip(IDLE)
    workers = [worker("p0"), worker("p1"), worker("d0", decodes=3)]
    for look in range(9):
        assert policy.decide(workers, look) is None
    change = policy.decide(workers, 9.0)
    assert changed(change) == ("p0", "decode", False)
    assert change is not None
    assert change.reason.startswith("busy for 0% of 10 s, roles.idle_share = 0.1; all that decode for 100%")
    # Everybody is watched anew.
    for look in range(9):
        assert policy.decide([worker("p1"), *workers[2:]], 10.0 + look) is None


@pytest.mark.parametrize(
    "workers",
    [
        [worker("p0"), worker("d0", decodes=3)],
        [worker("p0"), worker("p1"), worker("d0", decodes=3), worker("d1")],
        [worker("p0", prompts=1), worker("p1", prompts=1), worker("d0", decodes=3)],
        [worker("p0"), worker("p1")],
    ],
)
def test_the_last_one_stays_and_nobody_flips_to_those_who_idle(workers: list[Worker]) -> None:
    policy = IdleFlip(IDLE)
    assert all(policy.decide(workers, look) is None for look in range(30))


def test_who_waits_for_prompts_that_others_compute_idles_meanwhile() -> None:
    """Decode instances were booked for all that waited to be prefilled, and never went to help."""
    policy = IdleFlip(IDLE)
    workers = [worker("p0", prompts=9), worker("d0", decodes=5, coming=4), worker("d1", decodes=4, coming=4)]
    changes = [policy.decide(workers, look) for look in range(10)]
    assert changed(changes[-1]) == ("d1", "prefill", False)


def test_fixed_roles_have_no_policy() -> None:
    assert role_policy(RolesConfig()) is None
    assert isinstance(role_policy(SETTINGS), Overflow)
    assert isinstance(role_policy(IDLE), IdleFlip)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(["overflow", "idle_flip"]))
def test_whatever_the_load_each_kind_keeps_an_instance_and_in_peace_all_are_home(
    seed: int, kind: str
) -> None:
    chance = random.Random(seed)
    limits = replace_settings(policy=kind, idle_s=2.0, look_s=0.5, repurpose_s=8.0)
    policy = role_policy(limits)
    assert policy is not None
    workers = [worker(f"p{n}") for n in range(chance.randint(1, 4))]
    workers += [worker(f"d{n}") for n in range(chance.randint(1, 4))]
    now = 0.0
    for look in range(200):
        now += 0.5
        is_peace = look >= 150
        for place, each in enumerate(workers):
            if is_peace or chance.random() < 0.2:
                prompts, decodes = (0, 0) if is_peace else (chance.choice([0, 9]), chance.choice([0, 9]))
                load = {"queue_s": prompts / 3, "prompts": prompts, "kv_share": decodes / 10}
                workers[place] = replace(each, **load, decodes=decodes)  # type: ignore[arg-type]
        change = policy.decide(workers, now)
        if change is not None:
            [place] = [n for n, each in enumerate(workers) if each.instance_id == change.instance_id]
            home = workers[place].home if change.keeps_home else change.role
            workers[place] = replace(workers[place], role=change.role, home=home)
        for phase in OPPOSITE:
            assert any(has_phase(each.role, phase) for each in workers)
            assert any(each.home == phase for each in workers)
    assert all(each.role == each.home for each in workers)


def replace_settings(**changes: object) -> RolesConfig:
    return msgspec.structs.replace(SETTINGS, **changes)
