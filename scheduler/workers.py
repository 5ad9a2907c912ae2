"""Instances as policies of roles see them: what waits for each, and how full it is."""

from common.laws import queue_s
from common.messages import has_phase
from scheduler.policy.roles import Worker
from scheduler.state import SchedulerState
from scheduler.views import InstanceView


def workers_of(state: SchedulerState) -> list[Worker]:
    """Those that are ready. What waits at the scheduler for those that prefill counts as in their queues."""
    views = [view for view in state.instances.values() if view.is_ready]
    serving = sum(has_phase(view.role, "prefill") for view in views)
    return [worker_of(view, state.waiting.tokens // max(1, serving)) for view in views]


def worker_of(view: InstanceView, waiting_tokens: int) -> Worker:
    """Of one that is ready. ``waiting_tokens``: its share of what waits at the scheduler, if it prefills."""
    report, prefill, decode = view.report, view.for_prefill, view.for_decode
    assert report is not None, "it is ready"
    chunk_time = prefill.chunk_time
    queue_tokens = prefill.pending_tokens + waiting_tokens * has_phase(view.role, "prefill")
    waiting_s = None if chunk_time is None else queue_s(chunk_time, queue_tokens, prefill.chunk_tokens)
    return Worker(
        instance_id=view.instance_id,
        role=report.role,
        home=view.home,
        queue_tokens=queue_tokens,
        queue_s=waiting_s,
        prompts=view.booked.unreported + report.pending_prefill_requests + report.handovers_waiting,
        kv_share=decode.context_tokens / max(1, view.capacity_tokens),
        decodes=decode.requests,
        waiting=report.decode_unadmitted,
        coming=decode.requests - report.decode_running - report.decode_waiting,
    )
