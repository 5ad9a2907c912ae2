"""What a report counts, of states as they come to be."""

import pytest

from common.config import PrefillPolicy, SchedulerConfig
from common.ids import InstanceId
from common.lengths import certain
from common.messages import LoadReport, Role
from common.performance import FittedTime
from decode import events
from decode.state import DecodeState
from scheduler.policy.candidates import Arrival, DecodeCandidate, Objectives, PrefillCandidate, Scored
from scheduler.policy.dispatch import PREFILL_POLICIES
from services.hosts.load_report import Asked, asked_by, make_load_report
from services.hosts.measured_speed import MeasuredSpeed
from tests.decode.states import handle, make_state, start, task_of
from tests.prefill.states import make_state as make_prefill_state

EVERYTHING = Asked(has_needs=True, has_spare=True)


def report_of(decode: DecodeState, role: Role = "decode", asked: Asked = EVERYTHING) -> LoadReport:
    return make_load_report(
        make_prefill_state(),
        decode,
        MeasuredSpeed(),
        sequence=1,
        role=role,
        home=role,
        can_hand_on=True,
        tpot_s=lambda service_class: 0.1,
        now=0.0,
        asked=asked,
    )


def test_who_waits_for_memory_or_a_place_is_told_from_who_is_on_its_way() -> None:
    decode = make_state(total_blocks=64, max_batch=2)
    start(decode, "r1")
    handle(decode, events.TaskArrived(task_of("r2")))
    report = report_of(decode)
    assert (report.decode_running, report.decode_waiting, report.decode_unadmitted) == (1, 1, 0)
    handle(decode, events.TaskArrived(task_of("r3")))
    report = report_of(decode)
    assert (report.decode_waiting, report.decode_unadmitted) == (2, 1), "the batch has no place for it"
    full = make_state(total_blocks=3, max_batch=8)
    start(full, "r1")
    handle(full, events.TaskArrived(task_of("r2")))
    report = report_of(full)
    assert (report.decode_waiting, report.decode_unadmitted) == (1, 1), "the pool has no block for it"


def test_what_no_rule_asks_of_every_sequence_is_not_looked_at() -> None:
    decode = make_state(total_blocks=20, max_batch=8)
    start(decode, "r1", "r2", max_tokens=60)
    whole = report_of(decode, "mixed")
    assert whole.decode_spare_s is not None
    assert [each.request_id for each in whole.movable] == ["r1", "r2"], "both will not fit"
    half = report_of(decode, "mixed", Asked(has_needs=False, has_spare=True))
    assert half.decode_spare_s == whole.decode_spare_s
    assert not half.movable
    assert half.decode_need_tokens > whole.decode_need_tokens, "the most that it could be"
    assert report_of(decode, "mixed", Asked(has_needs=True, has_spare=False)).decode_spare_s is None


@pytest.mark.parametrize(
    ("settings", "is_judged", "asked"),
    [
        (SchedulerConfig(), False, Asked(has_needs=True, has_spare=False)),
        (SchedulerConfig(), True, EVERYTHING),
        (SchedulerConfig(prefill_policy="best_fit"), False, EVERYTHING),
        (SchedulerConfig(rebalance_decodes=False), False, Asked(has_needs=False, has_spare=False)),
    ],
)
def test_what_is_asked_follows_from_the_rules(
    settings: SchedulerConfig, is_judged: bool, asked: Asked
) -> None:
    assert asked_by(settings, are_rules_judged=is_judged) == asked


@pytest.mark.parametrize("policy", PREFILL_POLICIES)
def test_whoever_reads_how_far_ahead_decodes_are_has_it_asked_for(policy: PrefillPolicy) -> None:
    chunks = FittedTime((2.0, 1.0, 0.1), 0.0, 100)

    def scored(spare_s: float | None) -> list[Scored]:
        name = InstanceId("m0")
        beside = DecodeCandidate(name, 2, 500, 10_000)
        candidate = PrefillCandidate(name, 10, 1, 100.0, chunks, 512, 5.0, beside, spare_s)
        arrival = Arrival(0, 7, 30, 0, certain(10))
        return PREFILL_POLICIES[policy]([candidate], arrival, Objectives(9.0, 9.0))

    settings = SchedulerConfig(prefill_policy=policy)
    is_read = scored(-1.0) != scored(None)
    assert asked_by(settings, are_rules_judged=False).has_spare == is_read
