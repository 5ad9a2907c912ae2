"""Whom an attention worker serves, as events and commands.

A *binding* is one decode instance's use of this worker, with memory of its own. It ends with that life of the
instance, or when the instance says so; the memory goes with it, so nothing that is still in the air can be
written into another sequence's KV.
"""

from dataclasses import dataclass, field

from common.errors import InvalidRequest, NoInstanceReady, Overloaded
from common.ids import BindingId, Incarnation, InstanceId
from common.messages import BindAttention


@dataclass(frozen=True, slots=True)
class BindArrived:
    bind: BindAttention


@dataclass(frozen=True, slots=True)
class UnbindArrived:
    binding_id: BindingId


@dataclass(frozen=True, slots=True)
class BindingFailed:
    """The exchange's other side has ended, cannot be reached, or does not go on."""

    binding_id: BindingId


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """That life of a decode instance is over."""

    instance_id: InstanceId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Nobody new is served; who is served gives up this worker when his sequences here have ended."""


AttentionEvent = BindArrived | UnbindArrived | BindingFailed | InstanceLost | DrainStarted


@dataclass(frozen=True, slots=True)
class StartServing:
    bind: BindAttention
    total_blocks: int


@dataclass(frozen=True, slots=True)
class StopServing:
    """Give the binding's memory back."""

    binding_id: BindingId


@dataclass(frozen=True, slots=True)
class TellDraining:
    binding_id: BindingId
    decode_instance: InstanceId


AttentionCommand = StartServing | StopServing | TellDraining


@dataclass(slots=True)
class AttentionState:
    """``kv_bytes`` is shared out evenly among ``decode_instances``; ``exchange_bytes`` bounds each's."""

    worker_id: str
    kv_bytes: int
    exchange_bytes: int
    decode_instances: int
    bindings: dict[BindingId, BindAttention] = field(default_factory=dict)
    is_draining: bool = False

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        assert len(self.bindings) <= self.decode_instances, "more is promised than there is"
        instances = [bind.decode_instance for bind in self.bindings.values()]
        assert len({*instances}) == len(instances), "an instance is served twice"

    def handle(self, event: AttentionEvent) -> list[AttentionCommand]:
        """Raises Overloaded, NoInstanceReady, InvalidRequest for a binding that cannot be; then nothing
        has changed."""
        match event:
            case BindArrived(bind):
                return self._bind(bind)
            case UnbindArrived(binding_id) | BindingFailed(binding_id):
                return self._end([binding_id])
            case InstanceLost(instance_id, incarnation):
                lost = (instance_id, incarnation)
                return self._end(
                    [
                        binding_id
                        for binding_id, bind in self.bindings.items()
                        if (bind.decode_instance, bind.decode_incarnation) == lost
                    ]
                )
            case DrainStarted():
                self.is_draining = True
                return [
                    TellDraining(binding_id, bind.decode_instance)
                    for binding_id, bind in self.bindings.items()
                ]

    def _bind(self, bind: BindAttention) -> list[AttentionCommand]:
        if self.is_draining:
            raise NoInstanceReady(f"attention worker {self.worker_id} is draining")
        # The instance has begun anew, or given up on what it had here.
        former = [
            binding_id
            for binding_id, other in self.bindings.items()
            if other.decode_instance == bind.decode_instance
        ]
        if len(self.bindings) - len(former) >= self.decode_instances:
            raise Overloaded(
                f"attention worker {self.worker_id} serves attention.decode_instances ="
                f" {self.decode_instances} already",
                retry_after_s=1.0,
            )
        start = StartServing(bind, self._blocks_for(bind))
        commands = self._end(former)
        self.bindings[bind.binding_id] = bind
        return [*commands, start]

    def _blocks_for(self, bind: BindAttention) -> int:
        layout, shape = bind.layout, bind.shape
        if len(bind.attention_specs) != layout.layers:
            raise InvalidRequest(f"{len(bind.attention_specs)} attention specs for {layout.layers} layers")
        if (shape.kv_heads, shape.head_dim) != (layout.kv_heads, layout.head_dim):
            raise InvalidRequest(f"the exchange's shape {shape} is not the layout's {layout}")
        if shape.heads % shape.kv_heads:
            raise InvalidRequest(f"{shape.heads} heads cannot share {shape.kv_heads} KV heads")
        if bind.lanes < 1:
            raise InvalidRequest(f"lanes = {bind.lanes}: must be at least 1")
        needed = bind.lanes * (shape.request_bytes + shape.response_bytes)
        if needed > self.exchange_bytes:
            raise InvalidRequest(
                f"the exchange needs {needed} bytes; worker {self.worker_id} has attention.exchange_bytes ="
                f" {self.exchange_bytes}"
            )
        total_blocks = self.kv_bytes // self.decode_instances // layout.block_bytes
        if total_blocks < 1:
            raise InvalidRequest(
                f"a block has {layout.block_bytes} bytes; worker {self.worker_id} has attention.kv_bytes ="
                f" {self.kv_bytes} for attention.decode_instances = {self.decode_instances}"
            )
        return total_blocks

    def _end(self, binding_ids: list[BindingId]) -> list[AttentionCommand]:
        """Of those that are known: the end of a binding may be told by several."""
        known = [binding_id for binding_id in binding_ids if binding_id in self.bindings]
        for binding_id in known:
            del self.bindings[binding_id]
        return [StopServing(binding_id) for binding_id in known]
