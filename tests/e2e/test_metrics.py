"""What a running mesh exports: all that dashboards, alerts and scalers ask it for, and vLLM's names."""

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.commands.targets import Target
from tests.deploy.queries import Query, all_queries, read_by, selects
from tests.e2e.meshes import ROOT, Mesh, get_text, running_mesh

CONFIG = """
[service]
vllm_metrics = true
[instance]
block_size = 16
attention_partition = "requests"
[scaling]
policy = "dry_run"
window_s = 1.0
"""
"""Plans are made, and soon, since their numbers are metrics."""
REQUESTS = 12
OUTPUT_TOKENS = 24
SETTLE_TIMEOUT_S = 30.0
VLLM_NAMES_OF_MODEL_SERVERS = {
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
}
"""What llm-d's endpoint picker and KEDA objects made for vLLM ask each pod for."""
ROW = re.compile(
    r"^\| `(?P<name>[\w:]+)` \| (?P<kind>\w+) \| (?P<labels>.*?) ?\| (?P<of>.+?) \| (?P<what>.+) \|$",
    re.MULTILINE,
)
"""Of a table in docs/metrics.md."""
COMPONENTS = {
    "gateway": "gateways",
    "scheduler": "schedulers",
    "prefill": "instances",
    "decode": "instances",
    "attention": "attention workers",
    "predictor": "predictors",
}
OF_EACH_TARGET = {"job", "component", "instance", "le"}
"""Labels that the page does not repeat, with a histogram's own."""
OF_EACH_ALIAS = OF_EACH_TARGET | {"model_name", "engine"}


@dataclass(frozen=True, slots=True)
class Series:
    """One sample as Prometheus would keep it: with the labels of its target. ``family``: its name without the
    endings of a histogram's or a summary's samples. ``kind``, ``what``: as its process declares it."""

    name: str
    labels: dict[str, str]
    family: str
    kind: str
    value: float
    what: str


@dataclass(slots=True)
class Documented:
    """One row of docs/metrics.md: ``labels`` of its own, ``of`` whom it comes."""

    kind: str
    what: str
    labels: set[str] = field(default_factory=set)
    of: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def mesh(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Every kind of service, after some requests."""
    directory = tmp_path_factory.mktemp("metrics") / "mesh"
    options = ("--attention", "1", "--predictor", "history", "--model", str(tiny_model), "--dtype", "fp32")
    with running_mesh(directory, *options, config=CONFIG) as mesh:
        asyncio.run(complete_some(mesh))
        yield mesh


@pytest.fixture(scope="module")
def series(mesh: Mesh) -> list[Series]:
    """Once every query finds something, or cannot be waited for any more."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        found = scrape(mesh)
        if time.monotonic() > deadline_s or not any(missing_of(query, found) for query in all_queries()):
            return found
        asyncio.run(complete_some(mesh))


async def complete_some(mesh: Mesh) -> None:
    async with mesh.client() as client:
        await asyncio.gather(
            *(
                client.completions.create(
                    model="default",
                    prompt=[100 + index] * (20 + 30 * index),
                    max_tokens=OUTPUT_TOKENS,
                    extra_body={"ignore_eos": True},
                    timeout=120,
                )
                for index in range(REQUESTS)
            )
        )


def targets_of(mesh: Mesh) -> list[Target]:
    return [Target((each["targets"][0],), each["labels"]) for each in json.loads(mesh.lamella("targets"))]


def scrape(mesh: Mesh) -> list[Series]:
    found = []
    for target in targets_of(mesh):
        labels = {**target.labels, "job": "lamella"}
        found.append(Series("up", labels, "up", "gauge", 1.0, ""))
        for family in text_string_to_metric_families(get_text(f"http://{target.targets[0]}/metrics")):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found += [
                Series(
                    sample.name,
                    {**sample.labels, **labels},
                    name,
                    family.type,
                    sample.value,
                    family.documentation,
                )
                for sample in family.samples
            ]
    return found


def labels_of_pod(series: Series) -> dict[str, str]:
    """Its labels where a PodMonitor has Prometheus read pods, which have the services' names."""
    pod = series.labels["instance"]
    return {**series.labels, "namespace": "lamella", "pod": pod, "job": "lamella/lamella"}


def missing_of(query: Query, series: Sequence[Series]) -> str | None:
    """What the query asks for and nobody has."""
    read = read_by(query.parse())
    labels: set[str] = set()
    for selector in read.selectors:
        named = [each for each in series if each.name == selector.name]
        told = [labels_of_pod(each) if query.is_of_pods else each.labels for each in named]
        found = [each for each in told if selects(selector, each)]
        if not found:
            return f"{query.where}: no series for {selector}"
        labels.update(*found)
    unknown = (read.labels | query.shown) - labels
    return f"{query.where}: nothing has {sorted(unknown)}" if unknown else None


def test_every_service_is_a_target(mesh: Mesh) -> None:
    assert {target.labels["component"] for target in targets_of(mesh)} == set(COMPONENTS)


def test_what_dashboards_alerts_and_scalers_ask_for_is_there(series: list[Series]) -> None:
    missing = [missing_of(query, series) for query in all_queries()]
    assert [each for each in missing if each is not None] == []


def test_requests_are_seen_to_wait_in_every_phase_at_whom_they_wait(series: list[Series]) -> None:
    """A phase that nobody observes is drawn as one in which nobody waits."""
    counts: dict[tuple[str, str], float] = {}
    for each in series:
        if each.name == "lamella_queue_time_seconds_count":
            of = (
                "schedulers" if each.labels["component"] == "scheduler" else "instances",
                each.labels["phase"],
            )
            counts[of] = counts.get(of, 0.0) + each.value
    expected = {("instances", phase) for phase in ("prefill", "handover", "decode")}
    assert counts.keys() == expected | {("schedulers", "placement")}
    assert min(counts.values()) > 0, counts


def test_nothing_would_be_found_under_a_wrong_name_label_or_value(series: list[Series]) -> None:
    for wrong in (
        "lamella_kv_block",
        'lamella_kv_blocks{state="lost"}',
        "sum by (phase) (lamella_kv_blocks)",
        'lamella_requests_running{role="decode"}',
    ):
        assert missing_of(Query("wrong", wrong), series) is not None, wrong


def test_instances_answer_to_the_names_that_pickers_and_scalers_of_vllm_ask_for(
    series: list[Series], tiny_model: Path
) -> None:
    for component in ("prefill", "decode"):
        own = [each for each in series if each.labels["component"] == component]
        assert {each.name for each in own} >= VLLM_NAMES_OF_MODEL_SERVERS
    models = {each.labels["model_name"] for each in series if each.name.startswith("vllm:")}
    assert models == {tiny_model.name}


def test_the_documentation_tells_every_metric_as_it_is_and_no_other(series: list[Series]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = {
        row["name"]: Documented(
            row["kind"], row["what"], set(re.findall(r"`(\w+)`", row["labels"])), set(row["of"].split(", "))
        )
        for row in ROW.finditer(text)
    }
    assert documented == exported(series)


def exported(series: Sequence[Series]) -> dict[str, Documented]:
    """What the documentation is to say of all that is ours or has a name of vLLM's."""
    found: dict[str, Documented] = {}
    for each in series:
        if each.family.startswith(("lamella_", "vllm:")):
            implied = OF_EACH_TARGET if each.family.startswith("lamella_") else OF_EACH_ALIAS
            row = found.setdefault(each.family, Documented(each.kind, each.what))
            row.labels |= each.labels.keys() - implied
            row.of.add(COMPONENTS[each.labels["component"]])
    for row in found.values():
        row.of = {"every service"} if row.of == set(COMPONENTS.values()) else row.of
    return found
