"""What an instance reports of itself, made from the states of its two rooms. Pure: a mesh in virtual time
reports as a real one does."""

from collections.abc import Callable
from dataclasses import dataclass

from common.config import SchedulerConfig
from common.messages import LoadReport, Role
from decode.expectations import ALL_TOLD
from decode.forecast import NOTHING, least_spare_s, make_forecast
from decode.state import DecodeState
from prefill.forecast import needs_of_prompts, tokens_of_prompts
from prefill.state import PrefillState
from scheduler.policy.dispatch import BY_SEQUENCE
from services.hosts.measured_speed import MeasuredSpeed


@dataclass(frozen=True, slots=True)
class Asked:
    """What schedulers look at of that which takes looking at every sequence. ``has_needs``: what memory
    they will come to need, and who could leave; ``has_spare``: by how much they are ahead of their pace."""

    has_needs: bool
    has_spare: bool


def asked_by(settings: SchedulerConfig, *, are_rules_judged: bool) -> Asked:
    """``are_rules_judged``: those that do not decide are asked what they would have done, too
    (``scheduler.regret``)."""
    return Asked(settings.rebalance_decodes, are_rules_judged or settings.prefill_policy in BY_SEQUENCE)


def make_load_report(
    prefill: PrefillState,
    decode: DecodeState,
    speed: MeasuredSpeed,
    *,
    sequence: int,
    role: Role,
    home: Role,
    can_hand_on: bool,
    tpot_s: Callable[[str], float],
    now: float,
    asked: Asked,
    untold_steps: tuple[int, ...] = (),
) -> LoadReport:
    """Of an instance whose rooms share their blocks. ``sequence``: of its reports. ``can_hand_on``: sequences
    that run can leave. ``tpot_s``: promised to a class of service. ``now``: on the rooms' clock.
    ``untold_steps``: of each lane, that have ended, and the decode room is to be told of later
    (``DecodeState.untold``)."""
    blocks, sequences, block_size = prefill.blocks, decode.sequences, decode.block_size
    total_blocks, largest_pool_blocks = blocks.total_blocks, blocks.largest_pool_blocks
    free_blocks, tokens, untold = blocks.free_blocks, sequences.tokens, ALL_TOLD
    if untold_steps:
        untold = decode.untold(untold_steps)
        for lane, steps in enumerate(untold_steps):
            free_blocks -= decode.blocks_taken(steps, lane)
        tokens += untold.tokens
    forecast, spare_s = NOTHING, None
    if sequences or prefill.sequences:
        forecast = make_forecast(
            sequences,
            tokens_of_prompts(prefill.sequences.values()) if prefill.sequences else (),
            lambda: needs_of_prompts(prefill.sequences.values(), prefill.instance_id),
            block_size,
            total_blocks * block_size,
            can_hand_on=can_hand_on,
            are_needs_asked=asked.has_needs,
            untold=untold,
        )
    if role == "mixed" and asked.has_spare:
        spare_s = least_spare_s(sequences.values(), tpot_s, now, untold)
    return LoadReport(
        instance_id=prefill.instance_id,
        incarnation=prefill.incarnation,
        sequence=sequence,
        role=role,
        is_draining=not (prefill.is_admitting or decode.is_admitting) or not largest_pool_blocks,
        pending_prefill_tokens=prefill.pending_tokens,
        pending_prefill_requests=prefill.prompts.count,
        handovers_waiting=prefill.handovers_waiting,
        decode_running=sequences.in_batch,
        decode_waiting=len(sequences) - sequences.in_batch,
        decode_tokens=tokens,
        total_blocks=total_blocks,
        largest_pool_blocks=largest_pool_blocks,
        free_blocks=free_blocks,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
        decode_step_s=speed.decode_step_s,
        chunk_tokens=prefill.chunk_tokens,
        chunk_time=speed.chunk_time,
        step_time=speed.step_time,
        decode_coming_tokens=forecast.coming_tokens,
        decode_need_tokens=forecast.need_tokens,
        length_error_tokens=forecast.length_error_tokens,
        batch_error=forecast.batch_error,
        movable=forecast.movable,
        decode_spare_s=spare_s,
        decode_unadmitted=sequences.without_blocks,
        home=home,
    )
