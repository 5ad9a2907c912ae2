"""What a plan may be made of: kinds of instances, deployments of them, and the space that is searched."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import msgspec

from common.config import MixedPolicy, PrefillBatching
from common.cost import weight_bytes
from common.devices import Catalogue, DeviceSpec
from common.errors import ConfigError
from common.messages import Role
from common.shapes import ModelShape
from services.planner.budget import Budget
from services.simulator.performance.roofline import can_split
from services.simulator.stages import stage_token_bytes, stage_weight_bytes

GIB = float(1 << 30)
MEMORY_SHARE = 0.9
"""Of a device's memory: weights and KV (``services.simulator.config.ClusterConfig``)."""


class InstanceKind(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Instances that are alike: ``tensor`` devices of a kind that work as one in each of ``pipeline`` stages,
    and how they batch. ``max_decode_batch``: of all stages. ``attention_workers``: devices of another kind,
    or of the same, that hold its KV and compute attention, while ``staggered_batches`` take turns. ``nodes``:
    that its stages are spread over evenly."""

    role: Role
    device: str
    tensor: int = 1
    pipeline: int = 1
    chunk_tokens: int = 512
    prefill_batching: PrefillBatching = "chunks"
    mixed_policy: MixedPolicy = "chunked"
    max_decode_batch: int = 256
    attention_workers: int = 0
    attention_device: str | None = None
    staggered_batches: int = 1
    nodes: int = 1

    @property
    def own_devices(self) -> int:
        """That hold weights."""
        return self.tensor * self.pipeline

    @property
    def devices(self) -> int:
        return self.own_devices + self.attention_workers

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Kinds of devices, and how many of each an instance has."""
        own = (self.device, self.own_devices)
        if self.attention_device is None:
            return (own,)
        return (own, (self.attention_device, self.attention_workers))

    @property
    def turns(self) -> int:
        """Batches that are on their way at once."""
        return self.pipeline * self.staggered_batches

    @property
    def hardware(self) -> str:
        stages = f" PP{self.pipeline}" if self.pipeline > 1 else ""
        spread = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        own = f"{self.device} TP{self.tensor}{stages}{spread}"
        if self.attention_device is None:
            return own
        turns = f" in {self.staggered_batches} turns" if self.staggered_batches > 1 else ""
        return f"{own} + {self.attention_workers} {self.attention_device} for attention{turns}"

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of ``[instance]``, as far as its role reads them."""
        found: dict[str, Any] = {}
        if self.role != "decode":
            found |= {"chunk_tokens": self.chunk_tokens, "prefill_batching": self.prefill_batching}
        if self.role != "prefill":
            found["max_decode_batch"] = self.max_decode_batch
        if self.role == "mixed":
            found["mixed_policy"] = self.mixed_policy
        return found

    def __str__(self) -> str:
        words = [self.hardware]
        if self.role != "decode":
            words.append(f"{self.prefill_batching} of {self.chunk_tokens}")
        if self.role == "mixed":
            words.append(self.mixed_policy)
        if self.role != "prefill":
            words.append(f"batch {self.max_decode_batch}")
        return ", ".join(words)


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """``link_bytes_per_s``: of each instance; None: its devices' adapters together."""

    kind: InstanceKind
    count: int
    link_bytes_per_s: float | None = None


class Deployment(NamedTuple):
    """Pools that serve together."""

    pools: tuple[PoolPlan, ...]

    @property
    def devices(self) -> int:
        return sum(pool.count * pool.kind.devices for pool in self.pools)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Kinds of devices, and how many of each the instances of a pool have."""
        return tuple((device, pool.count * count) for pool in self.pools for device, count in pool.kind.parts)

    @property
    def is_disaggregated(self) -> bool:
        return any(pool.kind.role != "mixed" for pool in self.pools)

    @property
    def has_attention(self) -> bool:
        return any(pool.kind.attention_workers for pool in self.pools)

    def __str__(self) -> str:
        return " + ".join(f"{pool.count} {pool.kind.role} ({pool.kind})" for pool in self.pools)


class SearchSpace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is tried. ``tensors``: devices of a stage; ``pipelines``: stages of an instance, which fill up to
    ``nodes`` of ``node_devices``; ``batches``: ``max_decode_batch``. ``policies``:
    (``mixed_policy``, chunk tokens) of instances that do both; ``chunks``: (batching, tokens) of those that
    compute prompts alone. ``attention_ratios``: of decode instances whose KV lies on attention workers, so
    many ratios of devices, the best by Lamina's search."""

    devices: tuple[DeviceSpec, ...]
    tensors: tuple[int, ...] = (1, 2, 4, 8)
    pipelines: tuple[int, ...] = (1, 2)
    node_devices: int = 8
    nodes: int = 1
    batches: tuple[int, ...] = (32, 64, 128, 256, 512)
    policies: tuple[tuple[MixedPolicy, int], ...] = (
        ("prefill_first", 4096),
        ("orca", 4096),
        ("chunked", 512),
        ("chunked", 1024),
        ("chunked", 2048),
    )
    chunks: tuple[tuple[PrefillBatching, int], ...] = (
        ("chunks", 512),
        ("chunks", 1024),
        ("chunks", 2048),
        ("chunks", 4096),
        ("saturation", 512),
        ("saturation", 2048),
    )
    attention_ratios: int = 4


class Kinds(NamedTuple):
    """All that fit, by what they do. ``attention``: that decode with attention workers."""

    mixed: tuple[InstanceKind, ...]
    prefill: tuple[InstanceKind, ...]
    decode: tuple[InstanceKind, ...]
    attention: tuple[InstanceKind, ...] = ()

    @property
    def configurations(self) -> int:
        """One kind for both phases, or one for each."""
        return len(self.mixed) + len(self.prefill) * (len(self.decode) + len(self.attention))


def kinds_of(space: SearchSpace, shape: ModelShape, element_bytes: int, budget: Budget) -> Kinds:
    """Raises ConfigError where the model fits on none of them."""
    hardware = hardware_of(space, shape, element_bytes, budget)
    if not hardware:
        raise ConfigError("--model", shape.name, why_nothing_fits(space, shape, element_bytes, budget))
    return Kinds(
        tuple(_mixed(hardware, space)),
        tuple(
            InstanceKind(role="prefill", **each._asdict(), chunk_tokens=tokens, prefill_batching=batching)
            for each, (batching, tokens) in product(hardware, space.chunks)
        ),
        tuple(
            InstanceKind(role="decode", **each._asdict(), max_decode_batch=batch)
            for each, batch in product(hardware, space.batches)
        ),
    )


class Hardware(NamedTuple):
    """Fields of ``InstanceKind``."""

    device: str
    tensor: int
    pipeline: int
    nodes: int


def hardware_of(space: SearchSpace, shape: ModelShape, element_bytes: int, budget: Budget) -> list[Hardware]:
    """That the model fits on, each within the budget."""
    return [
        Hardware(device.name, tensor, pipeline, nodes)
        for device, tensor, pipeline in product(space.devices, space.tensors, space.pipelines)
        if (nodes := nodes_of(space, tensor, pipeline))
        and budget.allows([(device.name, tensor * pipeline)])
        and pipeline <= shape.layers
        and can_split(shape, tensor)
        and kv_room_tokens(shape, device, tensor, element_bytes, pipeline) > 0
    ]


def nodes_of(space: SearchSpace, tensor: int, pipeline: int) -> int | None:
    """The fewest over which the stages can be spread evenly; none of them is on two."""
    for nodes in range(1, space.nodes + 1):
        if pipeline % nodes == 0 and tensor * pipeline // nodes <= space.node_devices:
            return nodes
    return None


def _mixed(hardware: list[Hardware], space: SearchSpace) -> Iterator[InstanceKind]:
    for each, (policy, tokens), batch in product(hardware, space.policies, space.batches):
        if policy == "chunked" and batch > tokens:
            continue
        yield InstanceKind(
            role="mixed",
            **each._asdict(),
            chunk_tokens=tokens,
            prefill_batching="saturation" if policy in ("prefill_first", "splitwise") else "chunks",
            mixed_policy=policy,
            max_decode_batch=batch,
        )


def kv_room_tokens(
    shape: ModelShape, device: DeviceSpec, tensor: int, element_bytes: int, pipeline: int = 1
) -> int:
    """Of KV beside the weights, in the stage that has room for fewest; 0 where these do not fit."""
    memory = tensor * device.memory_bytes * MEMORY_SHARE
    stages = zip(
        stage_weight_bytes(shape, element_bytes, pipeline),
        stage_token_bytes(shape, element_bytes, pipeline),
        strict=True,
    )
    return max(0, min(int((memory - weights) / token) for weights, token in stages))


def why_nothing_fits(space: SearchSpace, shape: ModelShape, element_bytes: int, budget: Budget) -> str:
    tried = {tensor * pipeline for tensor, pipeline in product(space.tensors, space.pipelines)}
    possible = [each for each in tried if each <= space.nodes * space.node_devices]
    most = {
        device: max((each for each in possible if budget.allows([(device.name, each)])), default=0)
        for device in space.devices
    }
    sizes = ", ".join(
        f"{count} {device.name} have {count * device.memory_bytes * MEMORY_SHARE / GIB:.0f}"
        for device, count in most.items()
        if count
    )
    room = f", and {sizes} at a memory share of {MEMORY_SHARE:g}" if sizes else ""
    needed = weight_bytes(shape, element_bytes) / GIB
    would_do = ""
    if budget.limits and (unbounded := hardware_of(space, shape, element_bytes, Budget())):
        parts = [[(each.device, each.tensor * each.pipeline)] for each in unbounded]
        least = min(parts, key=budget.share)
        [(device, count)] = least
        would_do = f", where {count} {device} would do{budget.price(least)}"
    return (
        f"fits on no allowed number of devices{budget.within}{would_do}: its weights have {needed:.0f} GiB"
        f"{room}; {shape.heads} heads, {shape.kv_heads} of KV, must split evenly"
    )


def devices_of(names: str, catalogue: Catalogue) -> tuple[DeviceSpec, ...]:
    """``a100,h100``. Raises ConfigError naming those known."""
    found: list[DeviceSpec] = []
    for name in (each.strip().lower() for each in names.split(",")):
        if name not in catalogue:
            raise ConfigError("--devices", name, f"is none of {', '.join(sorted(catalogue))}")
        if catalogue[name] in found:
            raise ConfigError("--devices", names, f"names {catalogue[name].name} twice")
        found.append(catalogue[name])
    return tuple(found)


def priced(catalogue: Catalogue, prices: Mapping[str, Any], key: str) -> Catalogue:
    """The catalogue with the dollars an hour that are given. Raises ConfigError."""
    found = dict(catalogue)
    for name, price in prices.items():
        if name not in catalogue:
            raise ConfigError(key, name, f"is no device: must be one of {', '.join(sorted(catalogue))}")
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < float("inf"):
            raise ConfigError(f"{key}.{name}", price, "must be dollars an hour, over 0")
        found[name] = replace(catalogue[name], price_usd_h=float(price))
    return found
