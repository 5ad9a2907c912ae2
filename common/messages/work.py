"""What instances tell of work that is done: what a request's timeline and the mesh's links are drawn from."""

from typing import Literal

import msgspec

from common.ids import InstanceId, RequestId

WorkKind = Literal["prefill", "transfer"]


class Work(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A chunk of a prompt's ``tokens``, or a portion of KV that came from ``peer``. It took ``took_s`` and
    ended when this was sent."""

    request_id: RequestId
    attempt: int
    kind: WorkKind
    took_s: float
    tokens: int = 0
    kv_bytes: int = 0
    peer: InstanceId | None = None


class WorkDone(msgspec.Struct, frozen=True, tag="work-done"):
    """instance → gateway: what it has just done for this gateway's requests. Tokens tell of steps."""

    instance_id: InstanceId
    work: tuple[Work, ...]


class LinkTraffic(msgspec.Struct, frozen=True, tag="link-traffic"):
    """instance → whoever watches the mesh: KV bytes sent to each peer within the last ``window_s``."""

    instance_id: InstanceId
    window_s: float
    sent_bytes: dict[InstanceId, int]


class WorkerUse(msgspec.Struct, frozen=True):
    """What one attention worker holds for an instance: tokens of so many sequences, of as many as it can."""

    sequences: int
    used_tokens: int
    total_tokens: int


class AttentionUse(msgspec.Struct, frozen=True, tag="attention-use"):
    """decode → whoever watches the mesh, once a second: what its attention workers hold for it now, by their
    ids. A worker knows of memory that is promised; only the instance knows what of it is in use."""

    instance_id: InstanceId
    workers: dict[str, WorkerUse]
