"""Attention workers among a plan's kinds: the ratios that Lamina's search ranks first."""

from common.devices import DEVICES, H20, H100
from common.latency import ServiceObjectives
from common.shapes import LLAMA3_70B
from services.bench.traces import TraceRequest
from services.planner.attention_kinds import attention_kinds, partition_of
from services.planner.attention_ratio import RatioChoice, choose_ratio
from services.planner.budget import budget_of
from services.planner.candidates import MEMORY_SHARE, SearchSpace
from services.planner.demand import Demand
from services.planner.workload import workload_of

WORKLOAD = workload_of([TraceRequest(None, 1100 + number % 90, 200) for number in range(64)])
SPACE = SearchSpace(devices=(H100, H20), attention_ratios=5)


def demand_of(
    rate_per_s: float, most: int | None = None, tpot_s: float | None = 0.1, usd_h: float | None = None
) -> Demand:
    return Demand(
        objective="cost",
        rate_per_s=rate_per_s,
        budget=budget_of([H100, H20], most, usd_h),
        catalogue=DEVICES,
        objectives=ServiceObjectives(ttft_s=2.0, tpot_s=tpot_s),
        goal=0.9,
    )


def test_the_first_ratio_is_the_cheapest_that_the_cost_model_knows() -> None:
    demand = demand_of(20.0)
    found = attention_kinds(SPACE, LLAMA3_70B, WORKLOAD, 2, demand)
    assert len(found) == SPACE.attention_ratios
    least = min(
        DEVICES[each.model_device].price_usd_h * each.dop[0] * count
        + DEVICES[each.attention_device].price_usd_h * each.dop[1] * count
        for is_staggered in (True, False)
        for each in _ratios(is_staggered=is_staggered)
        if each.attention_device and each.dop[0] in SPACE.tensors and max(each.dop) <= SPACE.node_devices
        for count in [-(-demand.rate_per_s // (each.throughput.tokens_s / WORKLOAD.decoded))]
    )
    kind = found[0]
    assert kind.attention_device == "h20"
    assert kind.devices == kind.tensor + kind.attention_workers
    assert least <= demand.unit(kind) * 16
    served = demand.burden(kind, _served(kind.tensor, kind.attention_workers, kind.staggered_batches))
    assert served == least


def _ratios(*, is_staggered: bool) -> list[RatioChoice]:
    return choose_ratio(
        LLAMA3_70B,
        round(WORKLOAD.context_tokens),
        2,
        SPACE.devices,
        most_devices=16,
        step_s=0.1,
        is_staggered=is_staggered,
        memory_share=MEMORY_SHARE,
    )


def _served(a: int, b: int, batches: int) -> float:
    (found,) = (
        each.throughput.tokens_s / WORKLOAD.decoded
        for each in _ratios(is_staggered=batches == 2)
        if (each.model_device, each.attention_device, *each.dop) == ("h100", "h20", a, b)
    )
    return found


def test_none_has_more_devices_than_allowed_or_a_step_that_is_too_slow() -> None:
    assert all(
        kind.devices <= 5 for kind in attention_kinds(SPACE, LLAMA3_70B, WORKLOAD, 2, demand_of(20.0, most=5))
    )
    assert attention_kinds(SPACE, LLAMA3_70B, WORKLOAD, 2, demand_of(20.0, tpot_s=0.002)) == ()


def test_none_costs_more_than_allowed() -> None:
    found = attention_kinds(SPACE, LLAMA3_70B, WORKLOAD, 2, demand_of(20.0, usd_h=40.0))
    assert found
    costs = [sum(DEVICES[device].price_usd_h * count for device, count in kind.parts) for kind in found]
    assert max(costs) <= 40.0
    assert attention_kinds(SPACE, LLAMA3_70B, WORKLOAD, 2, demand_of(20.0, usd_h=1.0)) == ()


def test_none_is_looked_at_where_the_space_says_so() -> None:
    space = SearchSpace(devices=(H100, H20), attention_ratios=0)
    assert attention_kinds(space, LLAMA3_70B, WORKLOAD, 2, demand_of(20.0)) == ()


def test_workers_share_heads_where_these_come_out_even() -> None:
    assert [partition_of(LLAMA3_70B, workers) for workers in (1, 2, 4, 8, 3, 16)] == [
        *("heads",) * 4,
        *("requests",) * 2,
    ]
