"""The mesh as its members report it."""

import msgspec

from common.ids import Incarnation, InstanceId
from common.messages import (
    AttentionUse,
    InstanceRecord,
    LinkTraffic,
    Role,
    ServiceKind,
    ServiceRecord,
    WorkerUse,
)
from common.performance import FittedTime
from gateway.private.mesh_view import LawView, LinkView, MeshNews, pools_of
from tests.instance_records import make_record
from tests.load_reports import make_report

LIFE = Incarnation("i1")
LEASE_S = 3.0


def record(name: str, role: Role, life: Incarnation = LIFE) -> InstanceRecord:
    return make_record(
        name, role, life, host="here", pid=7, total_blocks=100, largest_pool_blocks=100, home=role
    )


def service(name: str, kind: ServiceKind) -> ServiceRecord:
    return ServiceRecord(
        service_id=name, incarnation=LIFE, kind=kind, host="here", pid=8, http_url="http://here:2"
    )


def test_an_instance_is_shown_with_what_it_reports() -> None:
    news = MeshNews(LEASE_S)
    news.take_members([record("decode-0", "decode"), service("gateway-0", "gateway")])
    report = make_report(
        "decode-0",
        "mixed",
        100,
        free_blocks=75,
        decode_running=3,
        decode_waiting=2,
        handovers_waiting=1,
        pending_prefill_requests=4,
        pending_prefill_tokens=640,
        decode_step_s=0.02,
        step_time=FittedTime((0.002, 0.001, 0.02), 0.05, 40),
        home="decode",
    )
    news.take(report, 1.0)
    [view] = news.instances(1.5)
    assert (view.id, view.role, view.home, view.state) == ("decode-0", "mixed", "decode", "ready")
    assert (view.queue_tokens, view.running, view.waiting, view.decode_step_s) == (640, 3, 7, 0.02)
    assert (view.kv_used_tokens, view.kv_total_tokens) == (25 * 16, 100 * 16)
    assert view.chunk_law is None
    assert view.step_law == LawView(
        seconds={"thousand tokens of context": 0.002, "sequence": 0.001, "step": 0.02},
        relative_error=0.05,
        samples=40,
    )
    assert [each.id for each in news.services(0.0)] == ["gateway-0"]


def test_an_attention_worker_holds_what_all_its_decode_instances_say() -> None:
    news = MeshNews(LEASE_S)
    draining = msgspec.structs.replace(service("attention-0", "attention"), is_draining=True)
    members = [record(f"decode-{index}", "decode") for index in range(2)]
    news.take_members([*members, draining, service("gateway-0", "gateway")])
    for index, heard_s in ((0, 1.0), (1, 3.0)):
        use = WorkerUse(2 + index, 320, 1600)
        news.take(AttentionUse(InstanceId(f"decode-{index}"), {"attention-0": use}), heard_s)
    worker, gateway = news.services(3.5)
    assert (worker.state, worker.running) == ("draining", 5)
    assert (worker.kv_used_tokens, worker.kv_total_tokens) == (640, 3200)
    assert (gateway.state, gateway.running, gateway.kv_total_tokens) == ("ready", 0, 0)
    assert news.services(1.0 + LEASE_S)[0].running == 3, "who fell silent counts no more"
    news.take_members([draining, service("gateway-0", "gateway")])
    assert news.services(3.5)[0].kv_total_tokens == 0


def test_an_instance_that_is_not_heard_of_for_a_lease_is_silent() -> None:
    news = MeshNews(LEASE_S, since_s=10.0)
    news.take_members([record("prefill-0", "prefill"), record("decode-0", "decode")])
    news.take(make_report("decode-0", "decode"), 12.0)
    assert [each.state for each in news.instances(12.5)] == ["ready", "ready"]
    assert [(each.id, each.state) for each in news.instances(14.0)] == [
        ("decode-0", "ready"),
        ("prefill-0", "silent"),
    ]


def test_one_that_drains_says_so() -> None:
    news = MeshNews(LEASE_S)
    news.take_members([record("decode-0", "decode")])
    news.take(make_report("decode-0", "decode", is_draining=True), 1.0)
    assert news.instances(1.0)[0].state == "draining"


def test_one_whose_attention_workers_are_gone_does_not_drain() -> None:
    news = MeshNews(LEASE_S)
    news.take_members([record("decode-0", "decode")])
    news.take(make_report("decode-0", "decode", is_draining=True, largest_pool_blocks=0), 1.0)
    assert news.instances(1.0)[0].state == "no_workers"


def test_the_report_of_an_earlier_life_says_nothing() -> None:
    news = MeshNews(LEASE_S)
    news.take_members([record("decode-0", "decode", Incarnation("i2"))])
    news.take(make_report("decode-0", "decode", decode_running=5), 1.0)
    assert not news.has_heard_everyone
    assert news.instances(1.0)[0].running == 0
    news.take(make_report("decode-0", "decode", 64, "i2", decode_running=6), 1.0)
    assert news.has_heard_everyone
    assert news.instances(1.0)[0].running == 6


def test_who_has_left_is_not_shown_nor_remembered() -> None:
    news = MeshNews(LEASE_S)
    news.take_members([record("decode-0", "decode")])
    news.take(make_report("decode-0", "decode", decode_running=5), 1.0)
    news.take_members([])
    assert news.instances(1.0) == []
    news.take_members([record("decode-0", "decode")])
    assert news.instances(1.0)[0].running == 0


def test_a_link_carries_what_was_sent_a_moment_ago() -> None:
    news = MeshNews(LEASE_S)
    prefill, decode = InstanceId("prefill-0"), InstanceId("decode-0")
    news.take(LinkTraffic(prefill, 2.0, {decode: 1000}), 10.0)
    assert news.links(11.0) == [LinkView(prefill, decode, 500.0)]
    assert news.links(14.0) == []


def test_pools_add_their_instances_up_by_the_role_that_they_have_now() -> None:
    news = MeshNews(LEASE_S)
    news.take_members([record(name, "decode") for name in ("decode-0", "decode-1", "decode-2")])
    news.take(make_report("decode-0", "decode", 100, decode_running=1, free_blocks=50), 1.0)
    news.take(make_report("decode-1", "decode", 100, decode_running=2), 1.0)
    news.take(make_report("decode-2", "prefill", 100, pending_prefill_tokens=9), 1.0)
    prefill, decode = pools_of(news.instances(1.0))
    assert (prefill.role, prefill.instances, prefill.queue_tokens) == ("prefill", ["decode-2"], 9)
    assert (decode.role, decode.instances, decode.running) == ("decode", ["decode-0", "decode-1"], 3)
    assert (decode.kv_used_tokens, decode.kv_total_tokens) == (50 * 16, 200 * 16)


def test_what_was_heard_before_nobody_listened_is_not_how_anybody_is_now() -> None:
    """A first look after long said "silent" of who was well, with the load of long ago."""
    news = MeshNews(LEASE_S)
    news.take_members([record("decode-0", "decode")])
    news.take(make_report("decode-0", "decode", 100, decode_running=3), 1.0)
    news.take(LinkTraffic(InstanceId("decode-0"), 1.0, {InstanceId("decode-1"): 8}), 1.0)
    assert news.has_heard_everyone
    news.begin(60.0)
    assert not news.has_heard_everyone
    [view] = news.instances(60.5)
    assert (view.state, view.running) == ("ready", 0)
    assert not news.links(1.1)
    assert [each.state for each in news.instances(60.0 + LEASE_S + 0.1)] == ["silent"]
