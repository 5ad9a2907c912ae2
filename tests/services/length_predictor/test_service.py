"""The predictor beside the scheduler, both as real processes: it never comes before prefill."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import Config, MeshConfig, PredictorConfig, PredictorKind
from common.lengths import certain
from services.length_predictor.oracle import digest_of
from tests.common.buses import run, until
from tests.gateway.processes import GatewayProcess
from tests.requests import make_request
from tests.services.length_predictor.processes import Mesh, joined_mesh, running_service

LENGTH = 321
TIMEOUT_S = 3.0


def config_of(nats_url: str, redis_url: str, namespace: str, directory: Path, kind: PredictorKind) -> Config:
    lengths_file = directory / "lengths.jsonl"
    digest = digest_of(make_request("r", 4).prompt_ids)
    lengths_file.write_text(f'{{"prompt": "{digest}", "output_tokens": {LENGTH}}}\n')
    return Config(
        mesh=MeshConfig(nats_url=nats_url, redis_url=redis_url, namespace=namespace, lease_s=30.0),
        predictor=PredictorConfig(kind=kind, lengths_file=lengths_file, timeout_s=TIMEOUT_S),
    )


@pytest.fixture
def oracle(nats_url: str, redis_url: str, namespace: str, tmp_path: Path) -> Config:
    return config_of(nats_url, redis_url, namespace, tmp_path, "oracle")


@pytest.fixture
def scheduler(oracle: Config, tmp_path: Path) -> Iterator[GatewayProcess]:
    with running_service("scheduler", oracle, tmp_path) as process:
        yield process


async def submit_when_known(mesh: Mesh, scheduler: GatewayProcess, request_id: str) -> None:
    await until(lambda: scheduler.metric("lamella_instances") == 2, mesh.bus)
    await mesh.submit(request_id)


def test_a_request_is_placed_by_history_and_the_predictor_s_word_follows_to_the_decode_instance(
    oracle: Config, scheduler: GatewayProcess, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with joined_mesh(oracle) as mesh:
            await submit_when_known(mesh, scheduler, "r1")
            assert mesh.tasks[0].lengths == certain(256), "the task did not wait for the predictor"
            await mesh.wait_told(1)
            assert mesh.told[0].request_id == "r1"
            assert mesh.told[0].lengths == certain(LENGTH)
            mesh.end("r1", LENGTH - 21)
            await mesh.bus.flush()

    with running_service("predictor", oracle, tmp_path) as predictor:
        run(scenario())
        predictor.wait_metric("lamella_length_prediction_outcomes_total", 1)
        assert predictor.metric("lamella_length_predictions_total") == 1
        assert 0 < predictor.metric("lamella_length_prediction_seconds_total") < TIMEOUT_S
        assert predictor.metric("lamella_length_prediction_error_tokens_total") == 21
    assert scheduler.metric("lamella_length_questions_total", "answered") == 1


def test_without_a_predictor_requests_are_placed_all_the_same_and_it_is_counted(
    oracle: Config, scheduler: GatewayProcess, tmp_path: Path
) -> None:
    """One that was killed has nobody behind its subject; one that hangs is waited for, but by no request."""

    async def scenario(predictor: GatewayProcess) -> None:
        async with joined_mesh(oracle) as mesh:
            await submit_when_known(mesh, scheduler, "r1")
            await mesh.wait_told(1)
            os.kill(predictor.popen.pid, signal.SIGSTOP)
            await mesh.submit("r2")
            timed_out = scheduler.metric("lamella_length_questions_total", "timeout")
            assert timed_out == 0, "a request waited for the predictor"
            await until(lambda: scheduler.metric("lamella_length_questions_total", "timeout") == 1, mesh.bus)
            predictor.popen.kill()
            predictor.popen.wait()
            await mesh.submit("r3")
            await mesh.submit("r4")
            assert [task.request.request_id for task in mesh.tasks] == ["r1", "r2", "r3", "r4"]
            await until(lambda: scheduler.metric("lamella_length_questions_total") == 4, mesh.bus)
            assert [each.request_id for each in mesh.told] == ["r1"]

    with running_service("predictor", oracle, tmp_path) as predictor:
        run(scenario(predictor))
    assert scheduler.metric("lamella_length_questions_total", "answered") == 1


def test_the_history_predictor_learns_from_what_requests_came_to(
    nats_url: str, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    config = config_of(nats_url, redis_url, namespace, tmp_path, "history")

    async def scenario(scheduler: GatewayProcess) -> None:
        async with joined_mesh(config) as mesh:
            await submit_when_known(mesh, scheduler, "r1")
            await mesh.wait_told(1)
            mesh.end("r1", 40)
            await mesh.bus.flush()
            await mesh.submit("r2")
            await mesh.wait_told(2)
            assert [each.lengths for each in mesh.told] == [certain(256), certain(40)]

    with (
        running_service("scheduler", config, tmp_path) as scheduler,
        running_service("predictor", config, tmp_path),
    ):
        run(scenario(scheduler))
