"""What instances report to schedulers."""

import msgspec

from common.ids import Incarnation, InstanceId, RequestId
from common.messages.roles import Role
from common.performance import DEFAULT_CHUNK_TOKENS, FittedTime


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
    over recent chunks that were near full, None before the first. ``chunk_time`` and ``step_time`` are what
    its own chunks and decode steps have taught it, or until then a profile (``common.performance``); its full
    chunks have ``chunk_tokens``.
    ``decode_unadmitted``: of those waiting for decode, that lack memory or a place in the batch; the others'
    KV is on its way.
    ``decode_tokens`` is the context held by running and waiting decodes. ``total_blocks`` are of all its KV
    pools, of which one sequence uses one: ``largest_pool_blocks`` bounds what it can take in.
    ``decode_coming_tokens`` are still to be drawn, and ``decode_need_tokens`` the most KV at one of the next
    steps, prompts' with it, by predictions made again where they were outlived; ``length_error_tokens``,
    ``batch_error``: by how much and of how many sequences.
    ``movable`` could leave; none is named where all fit (``decode.forecast``). Where
    ``scheduler.rebalance_decodes`` is off nobody is named, and ``decode_need_tokens`` is the most that it
    could be. ``decode_spare_s``: for how long decodes could stand still before one of them falls behind the
    pace that it was promised, negative where one is behind; None where none runs, no prompt can come in their
    way, or no rule asks for it (``services.hosts.load_report``).
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
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    chunk_time: FittedTime | None = None
    step_time: FittedTime | None = None
    decode_coming_tokens: int = 0
    decode_need_tokens: int = 0
    length_error_tokens: int = 0
    batch_error: int = 0
    movable: tuple[MovableSequence, ...] = ()
    decode_spare_s: float | None = None
    decode_unadmitted: int = 0
    home: Role | None = None
