"""The pods of the manifests make a mesh: they come up by their probes, hand KV over and go without a loss."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from common.config_file import load_config
from common.messages import InstanceRecord
from common.model.tokens import Tokenizer
from services.members import members_of
from tests.deploy.kubernetes.manifests import of_kind, rendered
from tests.e2e.meshes import stream_text
from tests.e2e.pods import Cluster, Pod, running_cluster
from tests.e2e.reference import greedy_tokens

OVERLAY = "cpu-demo"
STREAMS = 3
PROMPT_TOKENS = 300
OUTPUT_TOKENS = 200
ROLES = ("gateway", "scheduler", "prefill", "decode")


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """NATS, Redis and one pod of each role that the overlay has, all ready."""
    with running_cluster(
        OVERLAY,
        tmp_path_factory.mktemp("pods"),
        LAMELLA_MODEL=str(tiny_model),
        LAMELLA_DTYPE="fp32",
    ) as cluster:
        for server in ("nats", "redis"):
            cluster.start_server(server).wait_for("startupProbe")
        for role in ROLES:
            cluster.start(role)
        for pod in services_of(cluster):
            pod.wait_for("startupProbe")
            pod.wait_for("readinessProbe")
            assert pod.passes("livenessProbe")
        yield cluster


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    chance = random.Random(11)
    return [[chance.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(STREAMS)]


@pytest.fixture(scope="module")
def truth(tiny_model: Path, prompts: list[list[int]]) -> list[str]:
    tokenizer = Tokenizer(tiny_model)
    tokens = greedy_tokens(tiny_model, prompts, OUTPUT_TOKENS)
    return [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]


def services_of(cluster: Cluster) -> list[Pod]:
    """Without NATS and Redis."""
    return [pod for pod in cluster.pods if pod.name.startswith(ROLES)]


def pod_with(cluster: Cluster, role: str) -> Pod:
    """The newest of them."""
    return next(pod for pod in reversed(cluster.pods) if pod.name.startswith(role))


async def answers(cluster: Cluster, prompts: list[list[int]], begun: asyncio.Event) -> list[str]:
    url = f"{pod_with(cluster, 'gateway').url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        streams = (stream_text(client, prompt, OUTPUT_TOKENS, begun, 8) for prompt in prompts)
        return list(await asyncio.gather(*streams))


def test_pods_hand_kv_over_between_their_addresses(
    cluster: Cluster, prompts: list[list[int]], truth: list[str]
) -> None:
    assert asyncio.run(answers(cluster, prompts, asyncio.Event())) == truth
    assert pod_with(cluster, "prefill").metric("lamella_transfer_bytes_total") > 0
    assert pod_with(cluster, "prefill").metric("lamella_transfer_failures_total") == 0
    assert pod_with(cluster, "decode").metric("lamella_decode_tokens_total") > 0


def test_members_are_known_by_their_pods_names_and_addresses(cluster: Cluster) -> None:
    members = asyncio.run(members_of(load_config(None, cluster.url_files).mesh))
    found = {
        each.instance_id if isinstance(each, InstanceRecord) else each.service_id: each.http_url
        for each in members
    }
    assert found == {each.name: each.url for each in services_of(cluster)}


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_listens_where_a_policy_lets_others_in_and_nowhere_else(cluster: Cluster, role: str) -> None:
    pod = pod_with(cluster, role)
    labels = pod.workload["spec"]["template"]["metadata"]["labels"]
    opened = [
        range(port["port"], port.get("endPort", port["port"]) + 1)
        for policy in of_kind(rendered(OVERLAY), "NetworkPolicy").values()
        if policy["spec"]["podSelector"].get("matchLabels", {}).items() <= labels.items()
        for rule in policy["spec"].get("ingress", ())
        for port in rule["ports"]
    ]
    ports = pod.listening_ports()
    assert 8000 in ports
    closed = [port for port in ports if not any(port in each for each in opened)]
    # The private one, which in a pod is on its loopback address.
    assert closed == ([8001] if role == "gateway" else [])
    # Mooncake's two.
    assert len(ports) == (3 if role in ("prefill", "decode") else 1 + len(closed))


def test_a_decode_pod_is_replaced_amid_streams_without_a_token_lost(
    cluster: Cluster, prompts: list[list[int]], truth: list[str]
) -> None:
    old = pod_with(cluster, "decode")
    new = cluster.start("decode")
    new.wait_for("readinessProbe")

    async def replace() -> tuple[list[str], int]:
        begun = asyncio.Event()
        texts = asyncio.create_task(answers(cluster, prompts, begun))
        await begun.wait()
        status = await asyncio.to_thread(old.end)
        return await texts, status

    texts, status = asyncio.run(replace())
    assert (texts, status) == (truth, 0), old.log.read_text()
    # And whoever comes now is served by the new one.
    assert asyncio.run(answers(cluster, prompts, asyncio.Event())) == truth
    assert new.metric("lamella_decode_tokens_total") > 0


def test_every_pod_ends_well_in_its_time(cluster: Cluster) -> None:
    left = [pod for pod in services_of(cluster) if pod.process.poll() is None]
    assert {pod.name: pod.end() for pod in left} == dict.fromkeys((pod.name for pod in left), 0)
