"""Whom an attention worker serves, as events and commands.

A *binding* is one decode instance's use of this worker, with memory of its own. It ends with that life of the
instance, or when the instance says so; the memory is used for nothing else, so nothing that is still in the
air can be written into another sequence's KV. Where the instance did not say so, its KV is *kept* for a
while: another instance, or its own next life, goes on with a copy, as a model worker holds no state of its
own (Lamina 2, section 5).
"""

from dataclasses import dataclass, field

from common.errors import HandoverFailed, InvalidRequest, NoInstanceReady, Overloaded, UnknownRequest
from common.ids import BindingId, Incarnation, InstanceId
from common.messages import InstanceLife
from common.messages.attention import BindAttention

KEEP_S = 30.0
"""As long as a gateway tries to have a broken sequence continued."""


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


@dataclass(frozen=True, slots=True)
class KeepExpired:
    """The binding's KV was kept for as long as that was asked for."""

    binding_id: BindingId


AttentionEvent = BindArrived | UnbindArrived | BindingFailed | InstanceLost | DrainStarted | KeepExpired


@dataclass(frozen=True, slots=True)
class StartServing:
    bind: BindAttention
    total_blocks: int


@dataclass(frozen=True, slots=True)
class StopServing:
    """Give the binding's memory back."""

    binding_id: BindingId


@dataclass(frozen=True, slots=True)
class KeepKV:
    """Stop serving the binding, but keep its pool as it is; KeepExpired is due after ``keep_s``."""

    binding_id: BindingId
    keep_s: float


@dataclass(frozen=True, slots=True)
class DropKV:
    """Give the pool that was kept back."""

    binding_id: BindingId


@dataclass(frozen=True, slots=True)
class TellDraining:
    binding_id: BindingId
    decode_instance: InstanceId


AttentionCommand = StartServing | StopServing | KeepKV | DropKV | TellDraining


@dataclass(slots=True)
class AttentionState:
    """``kv_bytes`` is shared out evenly among ``decode_instances``; ``exchange_bytes`` bounds each's.

    ``kept``, oldest first: lost bindings whose KV is still there, at most as many as ``decode_instances``.
    """

    worker_id: str
    kv_bytes: int
    exchange_bytes: int
    decode_instances: int
    bindings: dict[BindingId, BindAttention] = field(default_factory=dict)
    kept: dict[BindingId, BindAttention] = field(default_factory=dict)
    is_draining: bool = False

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        assert len(self.bindings) <= self.decode_instances, "more is promised than there is"
        instances = [bind.decode_instance for bind in self.bindings.values()]
        assert len({*instances}) == len(instances), "an instance is served twice"
        assert len(self.kept) <= self.decode_instances, "more is kept than there is room for"
        lives = [*map(_life_of, self.bindings.values()), *map(_life_of, self.kept.values())]
        assert len({*lives}) == len(lives), "a life has two bindings"
        assert not (self.is_draining and self.kept), "KV is kept that nobody can take over"

    def handle(self, event: AttentionEvent) -> list[AttentionCommand]:
        """Raises Overloaded, NoInstanceReady, InvalidRequest for a binding that cannot be; then nothing
        has changed."""
        match event:
            case BindArrived(bind):
                return self._bind(bind)
            case UnbindArrived(binding_id) | KeepExpired(binding_id):
                return self._end([binding_id])
            case BindingFailed(binding_id):
                return self._keep([binding_id])
            case InstanceLost(instance_id, incarnation):
                lost = InstanceLife(instance_id, incarnation)
                return self._keep([each for each, bind in self.bindings.items() if _life_of(bind) == lost])
            case DrainStarted():
                self.is_draining = True
                told = [
                    TellDraining(binding_id, bind.decode_instance)
                    for binding_id, bind in self.bindings.items()
                ]
                return [*told, *self._end(list(self.kept))]

    def kept_for(self, binding_id: BindingId, former: InstanceLife) -> BindingId:
        """What is kept of that life, if that binding can use it. Raises UnknownRequest, HandoverFailed."""
        heir = self.bindings.get(binding_id)
        if heir is None:
            raise UnknownRequest(f"attention worker {self.worker_id} serves no binding {binding_id}")
        for kept_id, kept in self.kept.items():
            if _life_of(kept) == former:
                if _kv_format(kept) != _kv_format(heir):
                    raise HandoverFailed(
                        f"attention worker {self.worker_id} has other heads or another model now"
                    )
                return kept_id
        raise UnknownRequest(f"attention worker {self.worker_id} keeps no KV of {former.instance_id}")

    def _bind(self, bind: BindAttention) -> list[AttentionCommand]:
        if self.is_draining:
            raise NoInstanceReady(f"attention worker {self.worker_id} is draining")
        # The instance has begun anew, or given up on what it had here.
        former = [
            binding_id
            for binding_id, other in self.bindings.items()
            if other.decode_instance == bind.decode_instance
        ]
        # A life that binds again has sent its sequences back.
        ended = [
            binding_id
            for binding_id, other in (*self.bindings.items(), *self.kept.items())
            if _life_of(other) == _life_of(bind)
        ]
        if len(self.bindings) - len(former) >= self.decode_instances:
            raise Overloaded(
                f"attention worker {self.worker_id} serves attention.decode_instances ="
                f" {self.decode_instances} already",
                retry_after_s=1.0,
            )
        start = StartServing(bind, self._blocks_for(bind))
        commands = [*self._end(ended), *self._keep(former)]
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
        commands: list[AttentionCommand] = []
        for binding_id in binding_ids:
            if self.bindings.pop(binding_id, None) is not None:
                commands.append(StopServing(binding_id))
            elif self.kept.pop(binding_id, None) is not None:
                commands.append(DropKV(binding_id))
        return commands

    def _keep(self, binding_ids: list[BindingId]) -> list[AttentionCommand]:
        """Of those that are known. The oldest that is kept makes room."""
        if self.is_draining:
            return self._end(binding_ids)
        commands: list[AttentionCommand] = []
        for binding_id in binding_ids:
            bind = self.bindings.pop(binding_id, None)
            if bind is None:
                continue
            if len(self.kept) == self.decode_instances:
                commands += self._end([next(iter(self.kept))])
            self.kept[binding_id] = bind
            commands.append(KeepKV(binding_id, KEEP_S))
        return commands


def _life_of(bind: BindAttention) -> InstanceLife:
    return InstanceLife(bind.decode_instance, bind.decode_incarnation)


def _kv_format(bind: BindAttention) -> tuple[object, ...]:
    """KV moves only between equal ones."""
    return bind.layout, bind.first_head, bind.shape.element_type, bind.attention_specs
