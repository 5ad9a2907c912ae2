"""What gateways and instances ask a scheduler: where a request goes, and that it is over."""

import msgspec

from common.ids import Incarnation, InstanceId, RequestId
from common.messages.members import InstanceLife
from common.messages.requests import GenerationRequest


class SubmitRequest(msgspec.Struct, frozen=True, tag="submit"):
    """gateway → scheduler: place this request. Answered by a Placement, or Queued.

    ``lost_instances`` did not answer somebody who worked on an earlier attempt: they are not to be trusted
    before they are heard of again. ``former`` decoded the sequence until it was gone: its attention workers
    may have kept the KV. ``waited_s``: since it was first asked for, of one that was told that it waits, by
    whichever scheduler: each ask may reach another one. ``wanted_for_s``: since the request came, or
    lost its place: asks before this one found nobody.
    """

    request: GenerationRequest
    lost_instances: tuple[InstanceId, ...] = ()
    former: InstanceLife | None = None
    waited_s: float = 0.0
    wanted_for_s: float = 0.0


class Placement(msgspec.Struct, frozen=True, tag="placement"):
    """Where a request lives. Both instances are chosen at once (Splitwise IV-A); a sequence that is resumed
    has its decode instance for both, and so has one that is decoded where its prompt is computed.

    The incarnations are those that were chosen: word that one is gone says nothing of its successor.
    """

    prefill_instance: InstanceId
    prefill_incarnation: Incarnation
    decode_instance: InstanceId
    decode_incarnation: Incarnation


class Queued(msgspec.Struct, frozen=True, tag="queued"):
    """scheduler → gateway, instead of a Placement: the request waits here until an instance has hardly
    anything to do. Ask again at once, with the same message: who does not ask gives its place up."""


SubmitAnswer = Placement | Queued


class PlaceMoved(msgspec.Struct, frozen=True, tag="place-moved"):
    """instance → scheduler: find this sequence, which runs here or was refused where it was to run, another
    decode instance; or one that was just computed the best one as things are now. Answered by a Placement,
    whose prefill instance is ``former``, which has the KV. ``request.output_ids``: all that was drawn.
    ``wanted``: to be chosen if it still can take it. ``refused``: has just not taken it, which its reports
    may not say yet; to be chosen where nobody else is ready."""

    request: GenerationRequest
    former: InstanceLife
    wanted: InstanceId | None = None
    refused: InstanceId | None = None


class RequestEnded(msgspec.Struct, frozen=True, tag="ended"):
    """gateway → scheduler and predictor: the request is over, however it ended. ``output_tokens``: what it
    drew in all, where it came to its own end and not to that of its client's patience, or an error.
    ``is_cut``: that end was its ``max_tokens``, and it might have drawn more. ``ttft_s`` and ``tpot_s``: what
    its client saw, where it came to its own end. A submission that was not answered ends its ``attempt``; a
    later one may come."""

    request_id: RequestId
    prompt_tokens: int = 0
    output_tokens: int | None = None
    is_cut: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    attempt: int = 0
