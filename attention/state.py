"""Whom an attention worker serves, as events and commands.

One life of a worker serves one life of a model worker: when either ends, the worker's process ends, and its
successor has new memory. So nothing that is still in the air can be written into another sequence's KV.
"""

from dataclasses import dataclass

from common.errors import InvalidRequest, Overloaded
from common.ids import InstanceId
from common.messages import BindAttention


@dataclass(frozen=True, slots=True)
class BindArrived:
    bind: BindAttention


@dataclass(frozen=True, slots=True)
class ModelWorkerGone:
    """The exchange's other side has ended, or does not go on."""


AttentionEvent = BindArrived | ModelWorkerGone


@dataclass(frozen=True, slots=True)
class StartServing:
    bind: BindAttention
    total_blocks: int


@dataclass(frozen=True, slots=True)
class EndProcess:
    """This life is over."""


AttentionCommand = StartServing | EndProcess


@dataclass(slots=True)
class AttentionState:
    """``kv_bytes`` and ``exchange_bytes``: the memory there is."""

    worker_id: str
    kv_bytes: int
    exchange_bytes: int
    serves: InstanceId | None = None
    has_ended: bool = False

    def check(self) -> None:
        """Invariants, called by tests after every event."""
        assert not self.has_ended or self.serves is not None, "ended without having served"

    def handle(self, event: AttentionEvent) -> list[AttentionCommand]:
        """Raises Overloaded where somebody is served already, InvalidRequest for what cannot be served."""
        match event:
            case BindArrived(bind):
                return [self._bind(bind)]
            case ModelWorkerGone():
                if self.serves is None or self.has_ended:
                    raise ValueError("nobody is served")
                self.has_ended = True
                return [EndProcess()]

    def _bind(self, bind: BindAttention) -> StartServing:
        if self.serves is not None:
            raise Overloaded(f"attention worker {self.worker_id} serves {self.serves}", retry_after_s=1.0)
        layout, shape = bind.layout, bind.shape
        if len(bind.attention_specs) != layout.layers:
            raise InvalidRequest(f"{len(bind.attention_specs)} attention specs for {layout.layers} layers")
        if (shape.kv_heads, shape.head_dim) != (layout.kv_heads, layout.head_dim):
            raise InvalidRequest(f"the exchange's shape {shape} is not the layout's {layout}")
        if shape.heads % shape.kv_heads:
            raise InvalidRequest(f"{shape.heads} heads cannot share {shape.kv_heads} KV heads")
        if shape.request_bytes > self.exchange_bytes:
            raise InvalidRequest(
                f"a step's exchange needs {shape.request_bytes} bytes; worker {self.worker_id} has"
                f" attention.exchange_bytes = {self.exchange_bytes}"
            )
        total_blocks = self.kv_bytes // layout.block_bytes
        if total_blocks < 1:
            raise InvalidRequest(
                f"a block has {layout.block_bytes} bytes; worker {self.worker_id} has attention.kv_bytes ="
                f" {self.kv_bytes}"
            )
        self.serves = bind.decode_instance
        return StartServing(bind, total_blocks)
