"""Why an instance was not even scored: said beside the candidates of a decision."""

from collections.abc import Collection, Iterable, Mapping

from common.ids import InstanceId
from common.messages import Phase
from scheduler.decision_log import Barred
from scheduler.views import InstanceView, KVFormat


def barred_of(
    phase: Phase,
    members: Iterable[InstanceView],
    candidates: Collection[InstanceId],
    tokens: int,
    kv_formats: Collection[KVFormat],
    most_requests: int,
    distrusted: Mapping[InstanceId, str],
) -> tuple[Barred, ...]:
    """Of ``members``, who have the phase, those that are no candidates for a sequence of ``tokens``.
    ``kv_formats``: of those who could have exchanged KV with it. ``most_requests``: that one may have, while
    it decodes. ``distrusted``: whom no KV may get to, or from, and why."""
    barred = []
    for view in members:
        instance_id = view.record.instance_id
        if instance_id not in candidates:
            reason = distrusted.get(instance_id) or _why(phase, view, tokens, kv_formats, most_requests)
            barred.append(Barred(instance_id, reason))
    return tuple(barred)


def _why(
    phase: Phase, view: InstanceView, tokens: int, kv_formats: Collection[KVFormat], most_requests: int
) -> str:
    if view.report is None:
        return "has not reported yet"
    if view.report.is_draining:
        return "drains"
    if view.is_suspect:
        return "did not answer, and was not heard of since"
    if kv_formats and view.kv_format not in kv_formats:
        return "its KV has another model, dtype or block size"
    if view.longest_tokens < tokens:
        return f"holds {view.longest_tokens} tokens of a sequence, of {tokens}"
    if view.role != "prefill" and view.for_decode.requests >= most_requests:
        return f"has {view.for_decode.requests} requests; scheduler.max_requests_per_decode = {most_requests}"
    if phase == "prefill":
        return f"{view.for_prefill.pending_tokens} prompt tokens wait there, over a bound of [scheduler]"
    return "mixed: decodes what it prefilled itself"
