"""Why an instance was not even scored: said beside the candidates of a decision."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.ids import InstanceId
from common.messages import Phase
from scheduler.decision_log import Barred
from scheduler.views import InstanceView, KVFormat

STAYS_AT_HOME = "mixed: decodes what it prefilled itself"


@dataclass(slots=True)
class Elsewhere:
    """What is said of mixed instances other than the one that computes the prompt: the same of each of so
    many, at every placement, until somebody comes, goes or changes."""

    _members: Sequence[InstanceView] = ()
    _each: dict[InstanceId, Barred] = field(default_factory=dict)
    _than: dict[InstanceId, tuple[Barred, ...]] = field(default_factory=dict)

    def than(self, home: InstanceId, members: Sequence[InstanceView]) -> tuple[Barred, ...]:
        """``members``: all mixed and able to; another list where anything about them is another."""
        if members is not self._members:
            self._members, self._than = members, {}
            self._each = {view.instance_id: Barred(view.instance_id, STAYS_AT_HOME) for view in members}
        others = self._than.get(home)
        if others is None:
            others = tuple([each for name, each in self._each.items() if name != home])
            self._than[home] = others
        return others


def barred_of(
    phase: Phase,
    members: Iterable[InstanceView],
    candidates: Collection[InstanceId],
    tokens: int,
    kv_formats: Collection[KVFormat],
    most_requests: int,
    distrusted: Mapping[InstanceId, str],
    home: InstanceId | None = None,
) -> tuple[Barred, ...]:
    """Of ``members``, who have the phase, those that are no candidates for a sequence of ``tokens``.
    ``kv_formats``: of those who could have exchanged KV with it. ``most_requests``: that one may have, while
    it decodes. ``distrusted``: whom no KV may get to, or from, and why. ``home``: the mixed instance that
    computes the prompt, where one does: others of its kind do not decode it, whatever room they have."""
    barred = []
    for view in members:
        instance_id = view.instance_id
        if instance_id not in candidates:
            is_apart = home is not None and home != instance_id and view.role == "mixed"
            reason = distrusted.get(instance_id) or _why(
                phase, view, tokens, kv_formats, most_requests, is_apart=is_apart
            )
            barred.append(Barred(instance_id, reason))
    return tuple(barred)


def _why(
    phase: Phase,
    view: InstanceView,
    tokens: int,
    kv_formats: Collection[KVFormat],
    most_requests: int,
    *,
    is_apart: bool,
) -> str:
    if view.report is None:
        return "has not reported yet"
    if view.report.is_draining:
        return "drains"
    if view.is_suspect:
        return "did not answer, and was not heard of since"
    if phase == "prefill" and not kv_formats:
        return "nobody is ready to decode what it computes"
    if kv_formats and view.kv_format not in kv_formats:
        return "its KV has another model, dtype or block size"
    if view.longest_tokens < tokens:
        return f"holds {view.longest_tokens} tokens of a sequence, of {tokens}"
    if is_apart:
        return STAYS_AT_HOME
    if view.role != "prefill" and view.for_decode.requests >= most_requests:
        return f"has {view.for_decode.requests} requests; scheduler.max_requests_per_decode = {most_requests}"
    if phase == "prefill":
        return f"{view.for_prefill.pending_tokens} prompt tokens wait there, over a bound of the scheduler's"
    return STAYS_AT_HOME
