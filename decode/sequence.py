"""A sequence as the decode room keeps it."""

from dataclasses import dataclass

from common.errors import HandoverFailed, Overloaded
from common.ids import Incarnation, InstanceId
from common.kv.blocks import BlockOwner
from common.lengths import LengthDistribution, coming_tokens
from common.lifecycle import DecodePhase
from common.messages import DecodeTask, ErrorReply, GenerationRequest, ResumeTask

ROOM = "decode"
KV_LOST = ErrorReply(code=HandoverFailed.code, message="the attention worker that held the KV is gone")
PREFILL_GONE = ErrorReply(code=HandoverFailed.code, message="the prefill instance that holds the KV is gone")
PREEMPTED = ErrorReply(code=Overloaded.code, message="preempted: the decode instance ran out of KV blocks")


@dataclass(slots=True)
class DecodeSequence:
    """``pool``: the only one where its KV can be, as its workers keep it; None: any. ``failed_moves``
    count towards giving up to move it. ``is_source_gone``: no further portion of its KV comes.
    ``predicted``: how much it will draw, as was heard after its task. ``preemptions``: how often it has been
    given up for memory, here."""

    owner: BlockOwner
    task: DecodeTask | ResumeTask
    arrived_s: float
    output_ids: list[int]
    phase: DecodePhase = DecodePhase.WAITING
    is_cancelled: bool = False
    lane: int = 0
    pool: int | None = None
    failed_moves: int = 0
    is_source_gone: bool = False
    predicted: LengthDistribution | None = None
    preemptions: int = 0

    @property
    def has_blocks(self) -> bool:
        """In a KV pool, be it that they are read or written now."""
        return self.phase not in (DecodePhase.WAITING, DecodePhase.SWAPPED)

    @property
    def is_swapped(self) -> bool:
        """It is in the host tier, or on the way there or back."""
        return self.phase in (DecodePhase.SWAPPING_OUT, DecodePhase.SWAPPED, DecodePhase.SWAPPING_IN)

    @property
    def request(self) -> GenerationRequest:
        return self.task.request

    @property
    def awaits_first_token(self) -> bool:
        """Whether it comes with the last of the KV."""
        task = self.task
        return (
            isinstance(task, DecodeTask)
            and task.is_early
            and len(self.output_ids) == len(task.request.output_ids)
        )

    @property
    def coming_tokens(self) -> int:
        """That it is still expected to draw."""
        lengths, most = self.predicted or self.task.lengths, self.request.sampling.max_tokens
        return coming_tokens(lengths, len(self.output_ids), most)

    @property
    def left_tokens(self) -> int:
        """That it may still draw, at the most."""
        return self.request.sampling.max_tokens - len(self.output_ids)

    @property
    def length_error_tokens(self) -> int | None:
        """By how much it is to exceed what was predicted of it; None: it has not outlived that yet."""
        drawn, lengths = len(self.output_ids), self.predicted or self.task.lengths
        if lengths is None or drawn <= lengths.mean:
            return None
        return drawn + self.coming_tokens - round(lengths.mean)

    @property
    def tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def position(self) -> int:
        """Where the last token goes: the number of positions whose KV exists."""
        return self.tokens - 1


def source_of(task: DecodeTask | ResumeTask) -> tuple[InstanceId, Incarnation]:
    """Whose KV the sequence is to go on with."""
    if isinstance(task, DecodeTask):
        return task.prefill_instance, task.prefill_incarnation
    return task.former.instance_id, task.former.incarnation
