"""Between a prefill and a decode room: the KV, portion by portion, offers that come to nothing, and word of
links that carry no KV; and the leader's word to a decode room that is filling up, whose sequences others take
(Aladdin 4.3)."""

import msgspec

from common.ids import Incarnation, InstanceId, RequestId
from common.kv.layout import KVLayout


class KVDestination(msgspec.Struct, frozen=True):
    """A pool that holds KV heads ``first_head``..``first_head + kv_heads``: the decode instance's own (all
    heads), or an attention worker's. ``endpoint`` is the encoded address of its registered memory
    (``common.transfer``)."""

    endpoint: bytes
    first_head: int
    kv_heads: int
    total_blocks: int


class PullKV(msgspec.Struct, frozen=True, tag="pull"):
    """decode → prefill: write the next portion of the sequence's KV into these blocks of mine (DistServe 4.3:
    pull), or all of it, each part as soon as it stands (push).

    ``prefill_incarnation`` computed the KV: its successor under the same name knows nothing of it. Portions
    count from 0; one that is asked for again is not sent again. A portion has what is there, at most
    ``max_bytes`` rounded to whole positions of a layer, and at least one: where all that is
    computed has been sent, the answer waits. Without ``max_bytes`` the portion is all that is left.

    ``layout`` has all KV heads; each of ``destinations`` gets its share of them. The answer, KVDelivered or
    an error, comes only once no byte of this transfer is in the air any more. RequestCancelled: the sequence
    has ended, and its gateway knows.
    """

    request_id: RequestId
    attempt: int
    prefill_incarnation: Incarnation
    decode_instance: InstanceId
    blocks: tuple[int, ...]
    layout: KVLayout
    destinations: tuple[KVDestination, ...]
    portion: int
    max_bytes: int | None


class KVDelivered(msgspec.Struct, frozen=True, tag="delivered"):
    """prefill → decode: every byte of the portion is in your memory. After the last one the source blocks are
    free again. ``first_token``: the one that prefill drew, with the last portion. Attention worker → decode:
    every byte is in the other worker's memory."""

    kv_bytes: int
    transfer_s: float
    is_last: bool = True
    first_token: int | None = None


class OfferWithdrawn(msgspec.Struct, frozen=True, tag="offer-withdrawn"):
    """prefill → decode: the sequence that I offered has ended, and its gateway knows: do not wait for it."""

    request_id: RequestId
    attempt: int
    prefill_instance: InstanceId
    prefill_incarnation: Incarnation


class OfferDeclined(msgspec.Struct, frozen=True, tag="offer-declined"):
    """decode → prefill: the computed sequence that you offered, and that I had acknowledged, is to go on at
    ``wanted``. Nothing of its KV was asked for."""

    request_id: RequestId
    attempt: int
    decode_instance: InstanceId
    wanted: InstanceId


class KVLinkFailed(msgspec.Struct, frozen=True, tag="kv-link-failed"):
    """instance → schedulers: KV that ``sender`` was to write at ``receiver`` did not get there, or has been
    on its way for long. Both answer: whose fault it is nobody knows. The receiver says so, of what is slow
    the sender."""

    sender: InstanceId
    receiver: InstanceId


class KVLinkWorks(msgspec.Struct, frozen=True, tag="kv-link-works"):
    """instance → schedulers: KV of ``sender`` got to ``receiver``, one of whom was part of a link that
    failed: for the first time since, or it was that link."""

    sender: InstanceId
    receiver: InstanceId


class LeaveSequence(msgspec.Struct, frozen=True, tag="leave"):
    """leading scheduler → decode: let this sequence go on at ``wanted``, if it still runs or waits with you.
    Of others nothing is to be done. ``epoch``: with which the scheduler leads."""

    request_id: RequestId
    attempt: int
    wanted: InstanceId
    epoch: int
