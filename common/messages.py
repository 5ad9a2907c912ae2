"""What the services say to each other.

Every message is a frozen, tagged msgspec Struct and travels as msgpack. A message is a value: no service
keeps a second class that mirrors it. Token ids, block ids and counts are plain integers; times are seconds
and are only ever compared within the process that measured them.

A request's walk, by message::

    gateway   --SubmitRequest-->  scheduler  --PrefillTask-->  prefill   (calls, acknowledged)
    prefill   --TokenBatch----->  gateway                                (publish, token 0)
    prefill   --DecodeTask----->  decode                                 (call, acknowledged; a long prompt's
                                                                          before its token 0)
    decode    --PullKV--------->  prefill                                (calls, a portion each, answered when
                                                                          its bytes arrived)
    decode    --TokenBatch----->  gateway                                (publish, one a step)
    gateway   --RequestEnded--->  scheduler, predictor                   (publish)
    gateway   --CancelRequest-->  instances                              (publish; also the scheduler's, for a
                                                                          task that was not acknowledged)

`lamella flip` changes an instance's role (``FlipRole``). What decodes there then leaves::

    decode    --PlaceMoved---->  scheduler                               (call, answered with its new home)
    decode    --SequenceMoved->  gateway                                 (publish)
    prefill room of the same instance  --DecodeTask-->  decode           (and on as above)

A computed prompt whose decode instance refuses it, as it is full or about to end, goes on so, too.
A mixed instance decodes the prompts that it computes: of these nothing is sent.
And so do sequences of an instance that is expected to run out of memory, where another has room::

    scheduler --LeaveSequence->  decode                                  (publish, by the leader)
    decode    --OfferDeclined->  prefill                                 (publish, of one that has not begun)

Beside prefill, where there is a length predictor::

    scheduler --PredictLength-->  predictor                              (call, answered by PredictedLength)
    scheduler --LengthPredicted>  decode                                 (publish)

Where several schedulers run, each tells the others what it books (``common.booking_messages``).
"""

from typing import Literal

import msgspec

from common.errors import REQUEST_ERRORS, InternalError, RequestError
from common.ids import BindingId, GatewayId, Incarnation, InstanceId, RequestId
from common.kv.layout import KVLayout
from common.lengths import LengthDistribution
from common.performance import FittedTime, PromptTime

ServiceKind = Literal["gateway", "scheduler", "attention", "predictor"]
"""What runs without weights of its own."""
Phase = Literal["prefill", "decode"]
"""Of a request."""
Role = Literal["prefill", "decode", "mixed"]
"""What an instance admits; mixed: both. Both rooms exist in every instance, so a role is a rule, not a
deployment."""

FinishReason = Literal["stop", "length"]
"""Why a sequence ended by itself: an end-of-sequence or stop token, or its ``max_tokens``."""


def has_phase(role: Role, phase: Phase) -> bool:
    """Whether requests come to an instance of that role for that phase."""
    return role in (phase, "mixed")


class InstanceLife(msgspec.Struct, frozen=True):
    """One incarnation of one instance."""

    instance_id: InstanceId
    incarnation: Incarnation


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 is off. ``logprobs`` is the number of alternatives reported
    beside the chosen token's own log-probability; None reports nothing. The draw at output position p
    depends on ``(seed, p)`` alone, so a sequence continued elsewhere draws the same tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, complete enough to be started, or continued, anywhere.

    ``output_ids`` are tokens that the client already has: empty at first, filled when the sequence is
    continued after a preemption or the loss of an instance. ``attempt`` counts those continuations;
    whoever holds a lower attempt of the same request is superseded. ``service_class`` names what was promised
    (``common.service_classes``); where prompts queue it counts as ``head_start_s`` older than it is.
    """

    request_id: RequestId
    gateway_id: GatewayId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[int, ...] = ()
    attempt: int = 0
    service_class: str = "default"
    head_start_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens whose KV must exist before the next one can be drawn."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_total_tokens(self) -> int:
        """The longest the sequence can get: prompt and every output token."""
        return len(self.prompt_ids) + self.sampling.max_tokens


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A drawn token. ``logprob`` and ``top`` (id, logprob) are there when the request asked."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


# -- calls: each is answered by its reply or by an ErrorReply ---------------------------------------------


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """A RequestError on the wire; ``code`` is the class's own."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


def error_reply(error: RequestError) -> ErrorReply:
    """The error as it travels; ``REQUEST_ERRORS[code]`` turns it back."""
    return ErrorReply(error.code, error.message, error.param, error.retry_after_s)


def as_request_error(reply: ErrorReply) -> RequestError:
    """The error as it is raised on the other side; an unknown code becomes InternalError."""
    kind = REQUEST_ERRORS.get(reply.code, InternalError)
    return kind(reply.message, param=reply.param, retry_after_s=reply.retry_after_s)


class Acknowledged(msgspec.Struct, frozen=True, tag="ack"):
    """Taken over: the receiver now owns what the message carried."""


class SubmitRequest(msgspec.Struct, frozen=True, tag="submit"):
    """gateway → scheduler: place this request. Answered by a Placement, or Queued.

    ``lost_instances`` did not answer somebody who worked on an earlier attempt: they are not to be trusted
    before they are heard of again. ``former`` decoded the sequence until it was gone: its attention workers
    may have kept the KV.
    """

    request: GenerationRequest
    lost_instances: tuple[InstanceId, ...] = ()
    former: InstanceLife | None = None


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


class PrefillTask(msgspec.Struct, frozen=True, tag="prefill"):
    """scheduler → prefill: compute this prompt, then hand it to ``decode_instance``, which may be the same.
    ``lengths``: how many tokens it is expected to have drawn in the end."""

    request: GenerationRequest
    decode_instance: InstanceId
    decode_incarnation: Incarnation
    lengths: LengthDistribution | None = None


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


class PredictLength(msgspec.Struct, frozen=True, tag="predict-length"):
    """scheduler → predictor: how many tokens will this prompt draw? Answered by a PredictedLength."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    max_tokens: int


class PredictedLength(msgspec.Struct, frozen=True, tag="predicted"):
    """``lengths``: of the whole output, whatever of it has been drawn before."""

    lengths: LengthDistribution


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
    pull).

    ``prefill_incarnation`` computed the KV: its successor under the same name knows nothing of it. Portions
    count from 0; one that is asked for again is not sent again. A portion has what is there, at most
    ``max_bytes`` rounded to whole positions of a layer, and at least one: where all that is
    computed has been sent, the answer waits.

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
    max_bytes: int


class KVDelivered(msgspec.Struct, frozen=True, tag="delivered"):
    """prefill → decode: every byte of the portion is in your memory. After the last one the source blocks are
    free again. ``first_token``: the one that prefill drew, with the last portion. Attention worker → decode:
    every byte is in the other worker's memory."""

    kv_bytes: int
    transfer_s: float
    is_last: bool = True
    first_token: int | None = None


class PlaceMoved(msgspec.Struct, frozen=True, tag="place-moved"):
    """instance → scheduler: find this sequence, which runs here or was refused where it was to run, another
    decode instance. Answered by a Placement, whose prefill instance is ``former``, which has the KV.
    ``request.output_ids``: all that was drawn. ``wanted``: to be chosen if it still can take it. ``refused``:
    has just not taken it, which its reports may not say yet; to be chosen where nobody else is ready."""

    request: GenerationRequest
    former: InstanceLife
    wanted: InstanceId | None = None
    refused: InstanceId | None = None


class FlipRole(msgspec.Struct, frozen=True, tag="flip"):
    """command line or leading scheduler → instance: have this role from now on. Answered by a FlipProgress,
    and as often as asked again. ``epoch``: with which the scheduler leads; LeaderSuperseded: another does.
    ``keeps_home``: it is to come back to its home role, which otherwise becomes ``role``, too."""

    role: Role
    epoch: int | None = None
    keeps_home: bool = False


class FlipProgress(msgspec.Struct, frozen=True, tag="flip-progress"):
    """instance → command line: the role is that which was asked for. ``switch_s``: how long the last change
    took, ``left``: sequences of the former role that are still here, ``moved``: that have left since."""

    switch_s: float
    left: int
    moved: int


# -- published: nobody answers ------------------------------------------------------------------------------


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token of one sequence. ``index`` counts output tokens from 0 and is how gaps are seen."""

    request_id: RequestId
    attempt: int
    index: int
    token: SampledToken
    finish_reason: FinishReason | None = None


class TokenBatch(msgspec.Struct, frozen=True, tag="tokens"):
    """instance → gateway: the tokens of one step that belong to this gateway's requests."""

    instance_id: InstanceId
    tokens: tuple[TokenEvent, ...]


class SequenceFailed(msgspec.Struct, frozen=True, tag="failed"):
    """instance → gateway: this attempt ended without finishing. The gateway may continue it elsewhere when
    ``can_continue`` (preempted, hand-over failed, instance draining). ``lost_instance`` did not answer."""

    request_id: RequestId
    attempt: int
    error: ErrorReply
    can_continue: bool
    lost_instance: InstanceId | None = None


class SequenceMoved(msgspec.Struct, frozen=True, tag="moved"):
    """instance → gateway: this attempt goes on at another instance, with its KV and its ``output_tokens``.
    ``placement.prefill_instance``, which says so, is needed until the next token comes."""

    request_id: RequestId
    attempt: int
    placement: Placement
    output_tokens: int


class InstanceGone(msgspec.Struct, frozen=True, tag="gone"):
    """scheduler → everyone: this incarnation is no longer a member. Another one may be."""

    instance_id: InstanceId
    incarnation: Incarnation


class GatewayGone(msgspec.Struct, frozen=True, tag="gateway-gone"):
    """scheduler → instances: nobody reads this gateway's tokens any more."""

    gateway_id: GatewayId


class SchedulerGone(msgspec.Struct, frozen=True, tag="scheduler-gone"):
    """scheduler → gateways: that one has died; who waits for an answer to a submission may wait in vain."""

    scheduler_id: str
    incarnation: Incarnation


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """gateway → instances: forget this request, in whatever phase it is, up to and including ``attempt``.

    The scheduler sends it too, to a prefill instance that did not acknowledge a task in time: it may have it.
    """

    request_id: RequestId
    attempt: int


class OfferWithdrawn(msgspec.Struct, frozen=True, tag="offer-withdrawn"):
    """prefill → decode: the sequence that I offered has ended, and its gateway knows: do not wait for it."""

    request_id: RequestId
    attempt: int
    prefill_instance: InstanceId
    prefill_incarnation: Incarnation


class LeaveSequence(msgspec.Struct, frozen=True, tag="leave"):
    """leading scheduler → decode: let this sequence go on at ``wanted``, if it still runs or waits with you.
    Of others nothing is to be done. ``epoch``: with which the scheduler leads."""

    request_id: RequestId
    attempt: int
    wanted: InstanceId
    epoch: int


class OfferDeclined(msgspec.Struct, frozen=True, tag="offer-declined"):
    """decode → prefill: the computed sequence that you offered, and that I had acknowledged, is to go on at
    ``wanted``. Nothing of its KV was asked for."""

    request_id: RequestId
    attempt: int
    decode_instance: InstanceId
    wanted: InstanceId


class LengthPredicted(msgspec.Struct, frozen=True, tag="length-predicted"):
    """scheduler → decode: what the predictor says of a sequence that is yours, or is about to be. It takes
    the place of its task's ``lengths``."""

    request_id: RequestId
    attempt: int
    lengths: LengthDistribution


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


class LeaderAnnounced(msgspec.Struct, frozen=True, tag="leader"):
    """scheduler → schedulers, instances, launchers, as long as it leads: lower epochs are over.
    ``is_leaving``: it leads no more."""

    scheduler_id: str
    incarnation: Incarnation
    epoch: int
    is_leaving: bool = False


class AttentionDraining(msgspec.Struct, frozen=True, tag="attention-draining"):
    """attention worker → decode: give me no new sequences; unbind me when none is left."""

    worker_id: str
    binding_id: BindingId


class MovableSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that could go on elsewhere: its ``tokens``, and how many it is expected to draw.
    ``has_begun``: its KV lies with the decode instance."""

    request_id: RequestId
    attempt: int
    tokens: int
    coming_tokens: int
    has_begun: bool


class LoadReport(msgspec.Struct, frozen=True, tag="load", kw_only=True):
    """instance → scheduler, every 100 ms or on change (TetriInfer 3.2).

    ``pending_prefill_tokens`` are prompt tokens not yet computed; ``prefill_tokens_per_s`` is measured
    over recent chunks, None before the first. ``chunk_time`` and ``step_time`` are what its own chunks and
    decode steps have taught it (``common.performance``). ``decode_tokens`` is the context held by running and
    waiting decodes. ``total_blocks`` are of all its KV pools, of which one sequence uses one:
    ``largest_pool_blocks`` bounds what it can take in. ``decode_coming_tokens`` are still to be drawn, and
    ``decode_need_tokens`` the most KV at one of the next steps, both by predictions made again where they
    were outlived; ``length_error_tokens`` and ``batch_error``: by how much and of how many sequences.
    ``movable`` could leave; none is named where all fit (``decode.forecast``). ``decode_spare_s``: for how
    long decodes could stand still before one of them falls behind the pace that it was promised, negative
    where one is behind; None where none runs.
    """

    instance_id: InstanceId
    incarnation: Incarnation
    sequence: int
    role: Role
    is_draining: bool
    pending_prefill_tokens: int
    pending_prefill_requests: int
    handovers_waiting: int
    decode_running: int
    decode_waiting: int
    decode_tokens: int
    total_blocks: int
    largest_pool_blocks: int
    free_blocks: int
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    chunk_time: FittedTime | None = None
    step_time: FittedTime | None = None
    decode_coming_tokens: int = 0
    decode_need_tokens: int = 0
    length_error_tokens: int = 0
    batch_error: int = 0
    movable: tuple[MovableSequence, ...] = ()
    decode_spare_s: float | None = None
    home: Role | None = None


class InstanceRecord(msgspec.Struct, frozen=True, tag="instance", kw_only=True):
    """What an instance writes into the store under its lease; its pools are as they were at its start.
    ``device``: the kind that it computes on. ``home``: the role that it goes back to."""

    instance_id: InstanceId
    incarnation: Incarnation
    role: Role
    model: str
    host: str
    pid: int
    http_url: str
    block_size: int
    total_blocks: int
    largest_pool_blocks: int
    context_length: int
    dtype: str
    device: str = "cpu"
    home: Role | None = None

    @property
    def kv_format(self) -> tuple[str, str, int]:
        """KV moves only between equal ones: model, element type, tokens per block."""
        return self.model, self.dtype, self.block_size


class ServiceRecord(msgspec.Struct, frozen=True, tag="service", kw_only=True):
    """What a gateway or scheduler writes into the store under its lease."""

    service_id: str
    incarnation: Incarnation
    kind: ServiceKind
    host: str
    pid: int
    http_url: str


MemberRecord = InstanceRecord | ServiceRecord
InstanceCall = PrefillTask | DecodeTask | ResumeTask | PullKV | FlipRole
SchedulerCall = SubmitRequest | PlaceMoved
GatewayEvent = TokenBatch | SequenceFailed | SequenceMoved
SchedulerEvent = RequestEnded | LoadReport
Announcement = InstanceGone | GatewayGone | SchedulerGone
"""What the scheduler tells everyone."""
InstanceEvent = (
    CancelRequest
    | OfferWithdrawn
    | OfferDeclined
    | LeaveSequence
    | LengthPredicted
    | Announcement
    | AttentionDraining
)
