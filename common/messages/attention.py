"""Between decode instances and attention workers, over NATS: to be served, to pass KV on, to be left.

Nothing of a step is here: that goes through registered memory (``common.model.exchange``).
"""

import msgspec

from common.exchange_shape import ExchangeShape
from common.ids import BindingId, Incarnation, InstanceId
from common.kv.layout import KVLayout
from common.messages.hand_over import KVDestination
from common.messages.members import AreYouThere, InstanceLife
from common.spec import AttentionSpec


class BindAttention(msgspec.Struct, frozen=True, tag="bind_attention", kw_only=True):
    """decode → attention worker: serve me from now on, until one of us ends or I say otherwise.

    ``layout`` and ``attention_specs`` (a layer each) are of the worker's share of the heads, whose KV heads
    begin with ``first_head``. ``lanes``: how many batches are under way at once, each with regions of its
    own. ``endpoint`` is the encoded address of
    the decode instance's memory for this binding; its ``response_region``s take the outputs. ``salt`` is
    what sequence numbers count from.
    """

    binding_id: BindingId
    decode_instance: InstanceId
    decode_incarnation: Incarnation
    layout: KVLayout
    first_head: int
    attention_specs: tuple[AttentionSpec, ...]
    shape: ExchangeShape
    lanes: int
    endpoint: bytes
    salt: int


class AttentionBound(msgspec.Struct, frozen=True, tag="attention_bound"):
    """attention worker → decode: ``endpoint`` is the worker's memory for this binding: its KV pool of
    ``total_blocks`` and its ``request_region``s."""

    endpoint: bytes
    total_blocks: int


class UnbindAttention(msgspec.Struct, frozen=True, tag="unbind_attention"):
    """decode → attention worker: the binding's KV is not needed any more."""

    binding_id: BindingId


class FindKV(msgspec.Struct, frozen=True, tag="find_kv"):
    """decode → attention worker: of how many of this sequence's tokens do you keep the KV that ``former``,
    which is gone, had here? ``key``: ``common.ids.sequence_key``. Answered by KVFound, UnknownRequest, or
    HandoverFailed where the KV cannot go on in ``binding_id``, the caller's."""

    binding_id: BindingId
    former: InstanceLife
    key: int


class KVFound(msgspec.Struct, frozen=True, tag="kv_found"):
    tokens: int


class InheritKV(msgspec.Struct, frozen=True, tag="inherit_kv"):
    """decode → attention worker: copy the KV of that sequence's first ``tokens`` tokens, which you keep of
    ``former``, into these blocks of the pool that you hold for ``binding_id``.

    Acknowledged once it is there; after an answer of any kind nothing more is written for this call or one
    before it.
    """

    binding_id: BindingId
    former: InstanceLife
    key: int
    tokens: int
    blocks: tuple[int, ...]


class MoveKV(msgspec.Struct, frozen=True, tag="move_kv"):
    """decode → attention worker: write the KV of that sequence's first ``tokens`` tokens, in ``blocks`` of
    the pool that you hold for ``binding_id``, into ``destination_blocks`` of another worker's pool.

    KVDelivered once it is there, UnknownRequest, InvalidRequest or HandoverFailed; after an answer of any
    kind nothing more is written for this call or an equal one before it.
    """

    binding_id: BindingId
    key: int
    tokens: int
    blocks: tuple[int, ...]
    destination: KVDestination
    destination_blocks: tuple[int, ...]


class HoldKV(msgspec.Struct, frozen=True, tag="hold_kv"):
    """decode → attention worker: the KV of that sequence's first ``tokens`` tokens is in these blocks of the
    pool that you hold for ``binding_id``; another worker wrote it. Steps tell of everything else."""

    binding_id: BindingId
    key: int
    tokens: int
    blocks: tuple[int, ...]


class SettleKV(msgspec.Struct, frozen=True, tag="settle_kv"):
    """decode → attention worker: acknowledge this when nothing of that sequence's moves is in the air."""

    binding_id: BindingId
    key: int


class AttentionDraining(msgspec.Struct, frozen=True, tag="attention-draining"):
    """attention worker → decode: give me no new sequences; unbind me when none is left."""

    worker_id: str
    binding_id: BindingId


def request_region(lane: int) -> str:
    """The name of the memory through which a worker is asked."""
    return f"attention-request-{lane}"


def response_region(lane: int) -> str:
    """The name of the memory that takes a worker's outputs."""
    return f"attention-response-{lane}"


AttentionCall = (
    BindAttention | UnbindAttention | FindKV | InheritKV | MoveKV | HoldKV | SettleKV | AreYouThere
)
