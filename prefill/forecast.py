"""What an instance's prompts will come to need of its memory: for its load reports."""

from collections.abc import Iterable

from common.ids import InstanceId
from prefill.sequence import PrefillSequence
from scheduler.policy.decode_admission import Growing
from scheduler.policy.decode_rebalancing import as_growing


def tokens_of_prompts(sequences: Iterable[PrefillSequence]) -> list[int]:
    """Of each that is here: what it holds, or is owed once its turn has come."""
    return [each.tokens for each in sequences if not each.is_cancelled]


def needs_of_prompts(sequences: Iterable[PrefillSequence], instance_id: InstanceId) -> list[Growing]:
    """The same, and what it will come to need. One that is to be decoded by ``instance_id``, which this is,
    grows; others give their memory back as soon as their KV is elsewhere."""
    return [_need_of(each, instance_id) for each in sequences if not each.is_cancelled]


def _need_of(sequence: PrefillSequence, instance_id: InstanceId) -> Growing:
    if sequence.decode_instance != instance_id:
        return Growing(sequence.tokens, 1)
    drawn, most = len(sequence.request.output_ids), sequence.request.sampling.max_tokens
    return as_growing(sequence.tokens, sequence.coming_tokens, max(1, most - drawn))
