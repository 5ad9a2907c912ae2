"""What instances are given to do: a prompt to compute, a sequence to decode, one to forget."""

import msgspec

from common.ids import Incarnation, InstanceId, RequestId
from common.lengths import LengthDistribution
from common.messages.members import InstanceLife
from common.messages.requests import GenerationRequest
from common.performance import PromptTime


class PrefillTask(msgspec.Struct, frozen=True, tag="prefill"):
    """scheduler → prefill: compute this prompt, then hand it to ``decode_instance``, which may be the same.
    ``lengths``: how many tokens it is expected to have drawn in the end. ``is_bound_late``: the scheduler is
    to be asked where to, once the prompt is computed; it is ``decode_instance`` if there is no answer."""

    request: GenerationRequest
    decode_instance: InstanceId
    decode_incarnation: Incarnation
    lengths: LengthDistribution | None = None
    is_bound_late: bool = False


class HostProcess(msgspec.Struct, frozen=True):
    """``host`` is equal for two processes exactly when they can see each other's ``pid``."""

    host: str
    pid: int


class DecodeTask(msgspec.Struct, frozen=True, tag="decode"):
    """prefill → decode: take this sequence over, and pull its KV.

    ``kv_tokens`` positions of KV lie in ``prefill_instance``'s pool, or come to be there: the prompt may
    still be computed. ``request.output_ids`` includes the token that prefill drew (which has no KV yet); if
    that is still to come, the last portion of the KV brings it. ``sender``: who is going to write the KV.
    ``lengths``: as in ``PrefillTask``. ``prompt_time``: what it would take the sender to compute a prompt, as
    far as it has learned.
    """

    request: GenerationRequest
    prefill_instance: InstanceId
    prefill_incarnation: Incarnation
    kv_tokens: int
    sender: HostProcess | None = None
    lengths: LengthDistribution | None = None
    prompt_time: PromptTime | None = None

    @property
    def is_early(self) -> bool:
        """Whether the first token was not drawn yet when this was sent."""
        return self.kv_tokens == self.request.tokens


class ResumeTask(msgspec.Struct, frozen=True, tag="resume"):
    """scheduler → decode: go on with this sequence where ``former`` was when it went, if your attention
    workers have kept its KV; HandoverFailed where they have not."""

    request: GenerationRequest
    former: InstanceLife
    lengths: LengthDistribution | None = None


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """gateway → instances: forget this request, in whatever phase it is, up to and including ``attempt``.

    The scheduler sends it too, to a prefill instance that did not acknowledge a task in time: it may have it.
    """

    request_id: RequestId
    attempt: int
