"""A process's metrics under vLLM's names."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from common.instance_metrics import InstanceMetrics
from common.latency import TTFT
from common.telemetry import export_model, new_registry
from common.vllm_metrics import ALIASES, VllmNames
from gateway.metrics import GatewayMetrics
from scheduler.metrics import SchedulerMetrics
from tests.load_reports import make_report
from tests.metric_samples import Labels, samples

MODEL: Labels = (("engine", "0"), ("model_name", "tiny"))
ROOT = Path(__file__).resolve().parents[2]
ASKED_FOR = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "iteration_tokens_total",
    "cache_config_info",
    "request_success_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "admission_rejections_total",
)
"""By vLLM's own list of what it exports, llm-d's and production-stack's dashboards and scalers."""
KV_CACHE = {"kv_cache_usage_perc", "cache_config_info"}


def served_gateway() -> CollectorRegistry:
    registry = new_registry("gateway")
    metrics = GatewayMetrics(registry, ("default", "batch"))
    export_model(registry, "tiny")
    for service_class, seconds in (("default", 0.003), ("batch", 0.03), ("batch", 3.0)):
        metrics.ttft.observe(seconds, service_class)
    metrics.finished("stop")
    metrics.served(12, [3, 4])
    for reason in ("overloaded", "overloaded", "invalid_request"):
        metrics.refused(reason)
    return registry


def loaded_instance(prefill: int, handovers: int, decode: int) -> CollectorRegistry:
    registry = new_registry("decode")
    metrics = InstanceMetrics(registry)
    export_model(registry, "tiny")
    report = make_report(
        "i",
        "mixed",
        8,
        pending_prefill_requests=prefill,
        handovers_waiting=handovers,
        decode_waiting=decode,
        decode_running=4,
        free_blocks=2,
    )
    metrics.observe_load(report, quarantined_blocks=1, leaked_blocks=1, block_tokens=16)
    metrics.observe_step(4, 0.01)
    metrics.observe_prefill(queue_s=0.2, compute_s=0.4)
    metrics.observe_decode_queue(0.7)
    return registry


def test_a_gateway_tells_what_clients_see_summed_over_the_classes_of_service() -> None:
    read = samples(VllmNames(served_gateway()))
    name = "vllm:time_to_first_token_seconds"
    assert read[(f"{name}_count", MODEL)] == 3
    assert read[(f"{name}_sum", MODEL)] == pytest.approx(3.033)
    for bound_s, expected in ((0.001, 0), (0.005, 1), (0.04, 2), (5.0, 3)):
        assert read[(f"{name}_bucket", tuple(sorted((*MODEL, ("le", str(bound_s))))))] == expected
    assert read[("vllm:request_success_total", (MODEL[0], ("finished_reason", "stop"), MODEL[1]))] == 1
    assert read[("vllm:request_prompt_tokens_sum", MODEL)] == 12
    assert read[("vllm:request_generation_tokens_count", MODEL)] == 2
    refused = {
        dict(labels)["reason"]: value
        for (sample, labels), value in read.items()
        if sample == "vllm:admission_rejections_total"
    }
    assert refused == {"overloaded": 2, "no_instance_ready": 0}


def test_an_instance_tells_what_an_endpoint_picker_asks_of_a_model_server() -> None:
    read = samples(VllmNames(loaded_instance(prefill=3, handovers=5, decode=2)))
    assert read[("vllm:num_requests_waiting", MODEL)] == 5
    assert read[("vllm:num_requests_running", MODEL)] == 4
    assert read[("vllm:kv_cache_usage_perc", MODEL)] == 0.75
    shape = (("block_size", "16"), MODEL[0], MODEL[1], ("num_gpu_blocks", "8"))
    assert read[("vllm:cache_config_info", shape)] == 1
    assert read[("vllm:iteration_tokens_total_sum", MODEL)] == 4
    assert read[("vllm:request_queue_time_seconds_sum", MODEL)] == pytest.approx(0.2)
    assert read[("vllm:request_prefill_time_seconds_count", MODEL)] == 1


def test_our_own_names_stay_as_they_are() -> None:
    registry = served_gateway()
    both, own = samples(VllmNames(registry)), samples(registry)
    assert own[(f"{TTFT.name}_count", (("class", "batch"),))] == 2
    assert {name for name, _ in both if not name.startswith("vllm:")} == {name for name, _ in own}


def test_a_process_without_a_model_has_none_of_them() -> None:
    registry = new_registry("scheduler")
    SchedulerMetrics(registry).observe_mesh(2, 1, 0)
    assert not [name for name, _ in samples(VllmNames(registry)) if name.startswith("vllm:")]


def test_every_alias_names_a_family_that_one_kind_of_service_has() -> None:
    kinds = [served_gateway(), loaded_instance(0, 0, 0)]
    told = [{family.name.removeprefix("vllm:") for family in VllmNames(kind).collect()} for kind in kinds]
    assert {alias.theirs for alias in ALIASES} | KV_CACHE <= told[0] | told[1]
    assert not {alias.theirs for alias in ALIASES} & told[0] & told[1]


def test_what_counts_a_part_of_ours_says_which_part() -> None:
    """Whoever reads `admission_rejections` is not told of every error."""
    told = {family.name: family for family in VllmNames(served_gateway()).collect()}
    told |= {family.name: family for family in VllmNames(loaded_instance(1, 1, 1)).collect()}
    for alias in ALIASES:
        is_same = told[f"vllm:{alias.theirs}"].documentation == told[alias.ours].documentation
        assert is_same == (alias.only is None), alias.theirs


def test_every_name_that_vllms_dashboards_ask_for_is_documented_as_there_or_as_absent() -> None:
    there, _, absent = (ROOT / "docs" / "metrics.md").read_text().partition("are not there")
    names = {f"vllm:{each}" for each in ASKED_FOR}
    is_there = {name for name in names if f"| `{name}` |" in there}
    assert {name for name in names if f"`{name}`" in absent} == names - is_there


def test_openmetrics_readers_take_the_names_too() -> None:
    for kind, name in (
        (served_gateway(), "time_to_first_token_seconds"),
        (loaded_instance(1, 1, 1), "num_preemptions"),
    ):
        text = generate_openmetrics(VllmNames(kind)).decode()  # type: ignore[no-untyped-call]
        told = {family.name for family in read_openmetrics(text)}  # type: ignore[no-untyped-call]
        assert f"vllm:{name}" in told
