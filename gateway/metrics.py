"""What the user sees, in numbers: latencies, tokens, how requests end, and if that is what was promised."""

from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry

from common.errors import HandoverFailed, InstanceLost, KVLinkBroken, KVLost, NoInstanceReady, Overloaded
from common.latency import (
    DECODE_TIME,
    END_TO_END,
    TBT,
    TPOT,
    TTFT,
    RequestLatency,
    ServiceObjectives,
    has_met,
    is_within,
)
from common.messages import FinishReason
from common.telemetry import Instruments, LatencyHistogram, token_histogram

RESUME_CAUSES = (
    InstanceLost.code,
    KVLost.code,
    HandoverFailed.code,
    KVLinkBroken.code,
    Overloaded.code,
    NoInstanceReady.code,
    "gap",
    "bus_reconnect",
    "declared_gone",
    "scheduler_gone",
)
OBJECTIVES = ("ttft", "tpot", "end_to_end", "all")


class GatewayMetrics:
    """What the user sees: latencies, tokens and how requests end. ``classes``: of service, by name."""

    def __init__(self, registry: CollectorRegistry, classes: tuple[str, ...] = ("default",)) -> None:
        make = Instruments(registry)
        count, gauge = make.count, make.gauge
        self.ttft = LatencyHistogram(TTFT, registry, "class", classes)
        self.tpot = LatencyHistogram(TPOT, registry, "class", classes)
        self.tbt = LatencyHistogram(TBT, registry)
        self.decode_time = LatencyHistogram(DECODE_TIME, registry)
        self.end_to_end = LatencyHistogram(END_TO_END, registry)
        self._request_prompt_tokens = token_histogram(
            registry, "request_prompt_tokens", "Prompt tokens of a request that finished."
        )
        self._request_generation_tokens = token_histogram(
            registry, "request_generation_tokens", "Output tokens of a choice that finished."
        )
        self.prompt_tokens = count("prompt_tokens", "Tokens of accepted prompts.")
        self.generation_tokens = count("generation_tokens", "Tokens sent to clients.")
        self.disconnects = count("client_disconnects", "Clients that left before the end.")
        self.stream_gaps = count("stream_gaps", "Streams in which a token was missing.")
        self.continuations = count("requests_resumed", "Sequences continued elsewhere.", "cause")
        self.open_requests = gauge("open_requests", "Requests in the journal.")
        self._success = count("request_success", "Choices that finished.", "finish_reason")
        self._responses = count("http_responses", "Responses by status.", "status")
        self._refused = count(
            "requests_refused",
            "Calls that ended with an error, before their first token or amid a stream, by its code.",
            "reason",
        )
        self._judged = count(
            "requests_judged",
            "Choices that ended, failed or were refused; not those whose clients left.",
            "class",
        )
        self._met = count(
            "requests_within_objectives",
            "Of those judged, how many met an objective, or all: the rate of the latter is goodput.",
            "class",
            "objective",
        )
        self._met_tokens = count(
            "tokens_within_objectives",
            "Tokens of those that met all: the rate is goodput in tokens.",
            "class",
        )
        self._begin_at_zero(classes)

    def _begin_at_zero(self, classes: tuple[str, ...]) -> None:
        """All that is known beforehand: a rate does not see a series' first value, and the share of requests
        that met their objectives would begin too low."""
        for each in classes:
            self._judged.labels(each)
            self._met_tokens.labels(each)
            for objective in OBJECTIVES:
                self._met.labels(each, objective)
        for reason in (Overloaded.code, NoInstanceReady.code):
            self._refused.labels(reason)
        for finish_reason in get_args(FinishReason):
            self._success.labels(finish_reason)
        for cause in RESUME_CAUSES:
            self.continuations.labels(cause)

    def judge(
        self,
        service_class: str,
        objectives: ServiceObjectives,
        latency: RequestLatency | None,
        output_tokens: int,
    ) -> None:
        """One choice. Without a ``latency`` it was not served, and met nothing."""
        self._judged.labels(service_class).inc()
        if latency is None:
            return
        is_good = has_met(latency, objectives)
        met = (
            is_within(latency.ttft_s, objectives.ttft_s),
            is_within(latency.tpot_s, objectives.tpot_s),
            is_within(latency.end_to_end_s, objectives.end_to_end_s),
            is_good,
        )
        for objective, is_met in zip(OBJECTIVES, met, strict=True):
            self._met.labels(service_class, objective).inc(is_met)
        self._met_tokens.labels(service_class).inc(output_tokens if is_good else 0)

    def finished(self, reason: FinishReason) -> None:
        self._success.labels(reason).inc()

    def served(self, prompt_tokens: int, output_tokens: Iterable[int]) -> None:
        """A call was answered to its end: its prompt, and each of its choices."""
        self._request_prompt_tokens.observe(prompt_tokens)
        for each in output_tokens:
            self._request_generation_tokens.observe(each)

    def refused(self, reason: str) -> None:
        """``reason``: the code of an error (``common.errors``)."""
        self._refused.labels(reason).inc()

    def responded(self, status: int) -> None:
        self._responses.labels(str(status)).inc()
