"""States of meshes, as the private port tells them: a small one at work, and a large one."""

from itertools import accumulate, repeat

from common.ids import InstanceId, RequestId
from common.latency import ServiceObjectives, describe
from common.messages import DrainWish, Role, ScaleWish, WishState
from common.scaling import DesiredCounts, ServiceCount
from gateway.history import Span
from gateway.private.latency_view import ClassLatency, LatencyView
from gateway.private.mesh_view import (
    InstanceState,
    InstanceView,
    LeaderView,
    LinkView,
    MeshView,
    ServiceView,
    pools_of,
)
from gateway.private.wishes import WishView
from gateway.request_views import RequestList, RequestPhase, RequestTimeline, RequestView
from scheduler.decision_log import Choice, Decision
from scheduler.policy.candidates import Scored
from tests.ui.recorded_gateway import Shown

WISHES = ("flip", "scale", "drain")


def small_mesh() -> Shown:
    """Two prefill, two decode and a mixed instance, one with attention workers; a request in each phase."""
    requests = RequestList(
        running=[
            request("5f2a0c91d4b7e830", "decode", 128, 57, 41.0),
            request("91bb07c2a4d5f6e1", "recovery", 812, 203, 28.4, attempt=1),
            request("0c44d7a2b1e9f853", "transfer", 1930, 1, 1.92),
            request("c7d8a9b0e1f20314", "prefill", 3011, 0, 0.84, service_class="interactive"),
            request("e0a1b2c3d4e5f607", "queue", 640, 0, 0.12, service_class="batch"),
        ],
        ended=[
            request("77aa88bb99cc00dd", "finished", 96, 128, 6.41),
            request("12fe34dc56ba7890", "failed", 2048, 12, 3.08, error="no_instance_ready"),
            request("a0b1c2d3e4f50617", "left", 310, 44, 2.77),
        ],
    )
    return Shown(
        mesh=mesh(
            [
                instance("decode-0", "decode", running=14, used=0.62),
                instance("decode-1", "decode", running=11, waiting=2, used=0.94),
                instance("mixed-0", "mixed", home="decode", running=3, queue_tokens=512, used=0.21),
                instance("prefill-0", "prefill", queue_tokens=4211, waiting=6, used=0.35),
                instance("prefill-1", "prefill", state="draining", queue_tokens=640, waiting=1, used=0.08),
            ],
            {
                ("prefill-0", "decode-0"): 48.2e6,
                ("prefill-0", "decode-1"): 7.7e6,
                ("prefill-1", "decode-1"): 420e3,
            },
            [
                worker("attention-0", 4107, running=9, used=0.74),
                worker("attention-1", 4108, running=2, used=0.11, is_draining=True),
                ServiceView("gateway-0", "gateway", "node-1", 4101),
                ServiceView("scheduler-0", "scheduler", "node-1", 4102),
                ServiceView("scheduler-1", "scheduler", "node-1", 4103),
            ],
            DesiredCounts(
                (ServiceCount("decode", 2, 3, "at 31 requests/s two keep TPOT for 84 % only"),),
                7,
                1_795_312_800.0,
            ),
        ),
        latency=LatencyView(
            window_s=60.0,
            tokens_per_s=412.6,
            open_requests=5,
            classes=[latency("default", 92, 89), latency("interactive", 31, 24), latency("batch", 0, 0)],
            all=latency("all", 123, 113, is_sum=True),
        ),
        requests=requests,
        timelines=(recovered_timeline(requests.running[1]),),
        decisions=(
            placement("0c44d7a2b1e9f853", "prefill-0", "decode-1"),
            placement("91bb07c2a4d5f6e1", "prefill-0", "decode-0", drawn=203),
        ),
        chat=("A lamella ", "is a ", "thin plate."),
    )


def large_mesh() -> Shown:
    """Fifty-six instances, all busy, and ids as long as an orchestrator's."""
    small = small_mesh()
    prefill = [f"lamella-prefill-7c9f-{number:02}" for number in range(16)]
    decode = [f"lamella-decode-58d4-{number:02}" for number in range(40)]
    instances = [instance(each, "prefill", queue_tokens=9000, waiting=4, used=0.4) for each in prefill]
    instances += [instance(each, "decode", running=64, used=0.8) for each in decode]
    links = {(prefill[number % 16], each): 12.5e6 * number for number, each in enumerate(decode)}
    return Shown(
        mesh=mesh(instances, links, small.mesh.services, None), latency=small.latency, requests=small.requests
    )


def instance(
    id: str,
    role: Role,
    home: Role | None = None,
    state: InstanceState = "ready",
    queue_tokens: int = 0,
    running: int = 0,
    waiting: int = 0,
    used: float = 0.0,
) -> InstanceView:
    total = 98_304
    return InstanceView(
        id=InstanceId(id),
        role=role,
        home=home or role,
        state=state,
        host="node-1",
        pid=4200,
        device="cpu",
        queue_tokens=queue_tokens,
        running=running,
        waiting=waiting,
        kv_used_tokens=int(used * total),
        kv_total_tokens=total,
        prefill_tokens_per_s=None if role == "decode" else 8120.0,
        decode_step_s=None if role == "prefill" else 0.0241,
    )


def worker(id: str, pid: int, running: int, used: float, *, is_draining: bool = False) -> ServiceView:
    """An attention worker."""
    total = 65_536
    return ServiceView(
        id,
        "attention",
        "node-1",
        pid,
        state="draining" if is_draining else "ready",
        running=running,
        kv_used_tokens=int(used * total),
        kv_total_tokens=total,
    )


def mesh(
    instances: list[InstanceView],
    links: dict[tuple[str, str], float],
    services: list[ServiceView],
    plan: DesiredCounts | None,
    wishes: tuple[str, ...] = WISHES,
    wished: tuple[WishView, ...] = (),
) -> MeshView:
    return MeshView(
        gateway="gateway-0",
        model="SmolLM2-135M-Instruct",
        at_unix_s=1_795_312_812.0,
        is_bus_connected=True,
        is_store_answering=True,
        pools=pools_of(instances),
        instances=instances,
        links=[LinkView(InstanceId(a), InstanceId(b), rate) for (a, b), rate in links.items()],
        schedulers=[each.id for each in services if each.kind == "scheduler"],
        services=services,
        leader=LeaderView("scheduler-0", 7),
        plan=plan,
        wishes=list(wishes),
        wished=list(wished),
    )


def wished(wish: ScaleWish | DrainWish, state: WishState, since_s: float, reason: str = "") -> WishView:
    name = wish.role if isinstance(wish, ScaleWish) else wish.service_id
    return WishView(id=f"wish of {name}", wish=wish, state=state, reason=reason, since_s=since_s)


def latency(name: str, requests: int, met: int, *, is_sum: bool = False) -> ClassLatency:
    spread = range(1, requests + 1)
    return ClassLatency(
        service_class=name,
        requests=requests,
        met=met,
        attainment=met / requests if requests else None,
        goodput_requests_per_s=met / 60,
        goodput_tokens_per_s=met * 2.9,
        tokens_per_s=requests * 3.1,
        ttft_s=describe(0.18 + 0.004 * each for each in spread),
        tpot_s=describe(0.021 + 0.0002 * each for each in spread),
        objectives=None if is_sum else ServiceObjectives(ttft_s=0.5, tpot_s=0.1, end_to_end_s=None),
    )


def request(
    id: str,
    phase: RequestPhase,
    prompt_tokens: int,
    output_tokens: int,
    age_s: float,
    service_class: str = "default",
    attempt: int = 0,
    error: str | None = None,
) -> RequestView:
    is_placed = phase != "queue"
    return RequestView(
        id=RequestId(id),
        phase=phase,
        service_class=service_class,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=256,
        attempt=attempt,
        prefill_instance=InstanceId("prefill-0") if is_placed else None,
        decode_instance=InstanceId("decode-1") if is_placed else None,
        age_s=age_s,
        ttft_s=0.41 if output_tokens else None,
        tpot_s=0.024 if output_tokens > 1 else None,
        finish_reason="stop" if phase == "finished" else None,
        error=error,
    )


def recovered_timeline(view: RequestView) -> RequestTimeline:
    """Its first decode instance died; it is prefilled again, and decodes elsewhere."""
    prefill, first, second = InstanceId("prefill-0"), InstanceId("decode-0"), InstanceId("decode-1")
    steps = list(accumulate(repeat(0.05, 120), initial=0.52))
    later = list(accumulate(repeat(0.05, 60), initial=8.1))
    return RequestTimeline(
        view,
        [
            Span("queue", 0.0, 0.11, instance=prefill),
            Span("prefill", 0.11, 0.24, instance=prefill, tokens=512),
            Span("prefill", 0.24, 0.41, instance=prefill, tokens=300),
            Span("transfer", 0.41, 0.47, instance=first, peer=prefill, kv_bytes=18_874_368, tokens=812),
            Span("decode", 0.47, 6.52, instance=first, tokens=len(steps), step_ends_s=steps),
            Span("recovery", 6.52, 8.05, cause="instance_gone", noticed_s=7.52),
            Span("prefill", 7.6, 7.9, attempt=1, instance=prefill, tokens=932),
            Span("decode", 8.05, None, attempt=1, instance=second, tokens=len(later), step_ends_s=later),
        ],
    )


def placement(
    id: str, prefill: str, decode: str, drawn: int = 0, *, is_over: bool = False, output: int | None = None
) -> Decision:
    queues = (scored("prefill-0", 4211.0), scored("prefill-1", 640.0, "it is draining"))
    loads = (scored("decode-0", 0.62), scored("decode-1", 0.94))
    return Decision(
        RequestId(id),
        1 if drawn else 0,
        81.5,
        prompt_tokens=812,
        predicted_tokens=164.0,
        choices=(
            Choice("prefill", "shortest_queue", queues, InstanceId(prefill), predicted_s=0.31),
            Choice("decode", "least_loaded", loads, InstanceId(decode), predicted_s=0.024),
        ),
        drawn_tokens=drawn,
        is_over=is_over,
        output_tokens=output,
    )


def scored(id: str, score: float, refusal: str | None = None) -> Scored:
    return Scored(InstanceId(id), score, refusal)
