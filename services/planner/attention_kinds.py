"""Decode instances whose KV lies on attention workers, as a plan considers them: the ratios that Lamina's
search ranks first (L12), as kinds of instances beside the others.

One such kind is a decode instance with the weights on some devices and its attention workers on others.
Several of them share all their workers, as live ones do: by heads where these divide the model's KV heads,
else by requests.
"""

from collections.abc import Mapping
from typing import Any

from common.config import AttentionPartition, InstanceConfig
from common.devices import DeviceSpec
from common.kv.layout import KVLayout
from common.shapes import ModelShape
from decode.attention_needs import AttentionNeeds
from services.planner.attention_ratio import RatioChoice, choose_ratio
from services.planner.candidates import MEMORY_SHARE, InstanceKind, SearchSpace
from services.planner.demand import Demand
from services.planner.workload import PlannedWorkload
from services.simulator.attention_config import CONTEXT_LENGTH, ELEMENT_TYPES

ONE_WAY_S = 16.5e-6
"""Half of what a message between two hosts' devices takes there and back (Disaggregation 6.3)."""
STAGGERED = 2
"""Batches that take turns."""


def attention_kinds(
    space: SearchSpace, shape: ModelShape, workload: PlannedWorkload, element_bytes: int, demand: Demand
) -> tuple[InstanceKind, ...]:
    """The best few ratios by the cost model, at the batch that goes with each: those whose whole instances
    would cost the least, of equal ones those with the most tokens for it."""
    if not space.attention_ratios or element_bytes not in ELEMENT_TYPES or not workload.decoded:
        return ()
    most = 2 * space.node_devices
    if demand.budget.max_devices is not None:
        most = min(most, demand.budget.max_devices)
    found: dict[InstanceKind, tuple[float, float]] = {}
    for is_staggered in (True, False):
        choices = choose_ratio(
            shape,
            max(1, round(workload.context_tokens)),
            element_bytes,
            space.devices,
            most_devices=most,
            step_s=demand.objectives.tpot_s,
            is_staggered=is_staggered,
            memory_share=MEMORY_SHARE,
        )
        for choice in choices:
            if is_possible(choice, space):
                kind = kind_of(choice, is_staggered=is_staggered)
                if not demand.budget.allows(kind.parts):
                    continue
                served = choice.throughput.tokens_s / workload.decoded
                found[kind] = demand.burden(kind, served), demand.unit(kind) / served
    ranked = sorted(found, key=lambda kind: (found[kind], kind))
    return tuple(ranked[: space.attention_ratios])


def is_possible(choice: RatioChoice, space: SearchSpace) -> bool:
    a, b = choice.dop
    return choice.attention_device is not None and a in space.tensors and max(a, b) <= space.node_devices


def kind_of(choice: RatioChoice, *, is_staggered: bool) -> InstanceKind:
    a, b = choice.dop
    return InstanceKind(
        role="decode",
        device=choice.model_device,
        tensor=a,
        max_decode_batch=choice.throughput.batch,
        attention_workers=b,
        attention_device=choice.attention_device,
        staggered_batches=STAGGERED if is_staggered else 1,
    )


def partition_of(shape: ModelShape, workers: int) -> AttentionPartition:
    return "requests" if shape.kv_heads % workers else "heads"


def instance_settings(kind: InstanceKind, count: int, shape: ModelShape) -> dict[str, Any]:
    """Keys of ``[instance]``, of so many instances of the kind."""
    workers = count * kind.attention_workers
    found: dict[str, Any] = {
        "attention_workers": workers,
        "attention_partition": partition_of(shape, workers),
    }
    if kind.staggered_batches > 1:
        found |= {"pipeline": "rotational", "staggered_batches": kind.staggered_batches}
    return found


def worker_settings(
    kind: InstanceKind, count: int, shape: ModelShape, element_bytes: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Keys of ``[attention]``. ``settings``: sections of a mesh's, of which blocks and contexts count."""
    workers = count * kind.attention_workers
    needs = AttentionNeeds(
        heads=shape.heads,
        layout=KVLayout(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_size=settings.get("instance", {}).get("block_size", InstanceConfig().block_size),
            element_bytes=element_bytes,
        ),
        attention_specs=(),
        element_type=ELEMENT_TYPES[element_bytes],
        context_length=settings.get("model", {}).get("context_length") or CONTEXT_LENGTH,
        max_batch=kind.max_decode_batch,
        workers=workers,
        partition=partition_of(shape, workers),
        mini_batches=1,
        lanes=kind.staggered_batches,
    )
    exchange = needs.share(0).shape
    exchange_bytes = needs.lanes * (exchange.request_bytes + exchange.response_bytes)
    return {"decode_instances": count, "exchange_bytes": exchange_bytes}


def pool_table(name: str, workers: int, device: DeviceSpec, performance: Mapping[str, Any]) -> dict[str, Any]:
    """For the simulator, of so many workers."""
    return {
        "name": name,
        "role": "attention",
        "count": workers,
        "device": device.name,
        "link_bytes_per_s": device.network_bytes_s,
        "link_latency_s": ONE_WAY_S,
        "performance": dict(performance),
    }
