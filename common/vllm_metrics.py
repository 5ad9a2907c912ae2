"""A process's metrics under the names that dashboards, autoscalers and endpoint pickers know from vLLM.

Opt-in (``[service] vllm_metrics``). They are made from the process's own whenever it is scraped, so nothing
is counted twice and no token pays for them. Each name comes from one kind of service only, so that a sum over
all processes is right: gateways export what clients see, instances what a model server holds.

Which of vLLM's are not there, as nothing here means the same, docs/metrics.md says.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from common.errors import NoInstanceReady, Overloaded
from common.latency import DECODE_TIME, END_TO_END, PREFILL_TIME, QUEUE_TIME, TBT, TPOT, TTFT

ENGINE = "0"
"""vLLM numbers the engines within a process; here a process is one."""


@dataclass(frozen=True, slots=True)
class Alias:
    """vLLM's name of one of our families; both without a counter's ``_total``.

    ``labels`` stay, by our name and theirs; over all others it is summed. ``only``: the samples counted, by
    the values of a label; ``documentation`` then says what they are.
    """

    ours: str
    theirs: str
    labels: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, frozenset[str]] | None = None
    documentation: str | None = None


ALIASES = (
    # of gateways
    Alias(TTFT.name, "time_to_first_token_seconds"),
    Alias(TBT.name, "inter_token_latency_seconds"),
    Alias(TPOT.name, "request_time_per_output_token_seconds"),
    Alias(END_TO_END.name, "e2e_request_latency_seconds"),
    Alias(DECODE_TIME.name, "request_decode_time_seconds"),
    Alias("lamella_request_prompt_tokens", "request_prompt_tokens"),
    Alias("lamella_request_generation_tokens", "request_generation_tokens"),
    Alias("lamella_prompt_tokens", "prompt_tokens"),
    Alias("lamella_generation_tokens", "generation_tokens"),
    Alias("lamella_request_success", "request_success", {"finish_reason": "finished_reason"}),
    Alias(
        "lamella_requests_refused",
        "admission_rejections",
        {"reason": "reason"},
        ("reason", frozenset((Overloaded.code, NoInstanceReady.code))),
        "Calls refused since the mesh was full, or no instance was ready.",
    ),
    # of instances: what is handed over waits at the decode instance, too
    Alias("lamella_requests_running", "num_requests_running"),
    Alias(
        "lamella_requests_waiting",
        "num_requests_waiting",
        {},
        ("room", frozenset(("prefill", "decode"))),
        "Prompts not yet computed, and sequences that no decode step has had yet.",
    ),
    Alias("lamella_preemptions", "num_preemptions"),
    Alias("lamella_pass_tokens", "iteration_tokens_total"),
    Alias(
        QUEUE_TIME.name,
        "request_queue_time_seconds",
        {},
        ("phase", frozenset(("prefill",))),
        "From a prompt's arrival at a prefill instance to its first chunk.",
    ),
    Alias(PREFILL_TIME.name, "request_prefill_time_seconds"),
)


class VllmNames(Collector):
    """Everything that ``own`` has, and beside it the same under vLLM's names."""

    def __init__(self, own: Collector) -> None:
        self._own = own

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for family in self._own.collect():
            families[family.name] = family
            yield family
        yield from vllm_families(families)


def vllm_families(families: Mapping[str, Metric]) -> Iterator[Metric]:
    """Nothing for a process that serves no model, or none yet."""
    model = families.get("lamella_model_info")
    if model is None:
        return
    labels = {"model_name": model.samples[0].labels["model_name"], "engine": ENGINE}
    for alias in ALIASES:
        if alias.ours in families:
            yield _renamed(families[alias.ours], alias, labels)
    if "lamella_kv_blocks" in families:
        yield from _kv_cache(families["lamella_kv_blocks"], families["lamella_kv_block_tokens"], labels)


def _renamed(family: Metric, alias: Alias, labels: Mapping[str, str]) -> Metric:
    name = f"vllm:{alias.theirs}"
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    kept = {**alias.labels, "le": "le"}
    for sample in family.samples:
        if alias.only is not None and sample.labels[alias.only[0]] not in alias.only[1]:
            continue
        told = {theirs: sample.labels[ours] for ours, theirs in kept.items() if ours in sample.labels}
        key = (name + sample.name.removeprefix(family.name), tuple({**labels, **told}.items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    renamed = Metric(name, alias.documentation or family.documentation, family.type)
    renamed.samples = [Sample(each, dict(told), value) for (each, told), value in sums.items()]
    return renamed


def _kv_cache(blocks: Metric, block_tokens: Metric, labels: Mapping[str, str]) -> Iterator[Metric]:
    """The pool: the share of it that nobody can be given (0..1), and its shape."""
    by_state = {sample.labels["state"]: sample.value for sample in blocks.samples}
    total = sum(by_state.values())
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "KV cache usage, 1: all of it.", labels=tuple(labels)
    )
    shape = {"block_size": f"{block_tokens.samples[0].value:g}", "num_gpu_blocks": f"{total:g}"}
    config = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's shape.", labels=(*labels, *shape))
    if by_state:
        free_share = by_state["free"] / total if total else 0.0
        usage.add_metric(tuple(labels.values()), 1.0 - free_share)
        config.add_metric((*labels.values(), *shape.values()), 1.0)
    yield usage
    yield config
