"""Length predictors of a given accuracy in simulated meshes."""

import random
from typing import Any

import pytest

from common.errors import ConfigError
from common.ids import GatewayId, RequestId
from common.messages import GenerationRequest, SamplingParams
from services.simulator.config import Simulated
from services.simulator.metrics import measure
from services.simulator.prediction import InaccuratePredictor, PredictionConfig
from services.simulator.run import Load, Offered, simulate
from tests.services.simulator.meshes import mesh, pool

REQUESTS = 4000
PUBLISHED = ((100, 0.589), (200, 0.749), (400, 0.85))
"""TetriInfer 5.2.2: the accuracy of its OPT-125M at three granularities."""


def request(number: int, max_tokens: int = 10_000) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(f"r{number}"),
        gateway_id=GatewayId("g"),
        prompt_ids=(0,),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


@pytest.mark.parametrize(("granularity", "accuracy"), PUBLISHED)
def test_the_right_bucket_is_named_as_often_as_is_said_and_else_one_beside_it(
    granularity: int, accuracy: float
) -> None:
    predictor = InaccuratePredictor(
        PredictionConfig(accuracy=accuracy, granularity=granularity), 3, lambda _: 0
    )
    lengths = [random.Random(number).randint(1, 1500) for number in range(REQUESTS)]
    off = [
        predictor.name_bucket(RequestId(f"r{number}"), length) - length // granularity
        for number, length in enumerate(lengths)
    ]
    deviation = (accuracy * (1 - accuracy) / REQUESTS) ** 0.5
    assert off.count(0) / REQUESTS == pytest.approx(accuracy, abs=4 * deviation)
    assert {*off} == {-1, 0, 1}
    inner = [error for error, length in zip(off, lengths, strict=True) if error and length >= granularity]
    assert inner.count(1) / len(inner) == pytest.approx(0.5, abs=4 * (0.25 / len(inner)) ** 0.5)
    outer = [error for error, length in zip(off, lengths, strict=True) if length < granularity]
    assert {*outer} == {0, 1}


def test_its_answer_is_as_sure_as_it_is_right() -> None:
    config = PredictionConfig(accuracy=0.8, granularity=200)
    predictor = InaccuratePredictor(config, 0, lambda _: 500)
    answers = {predictor.predict(request(number)).points for number in range(100)}
    shares = [pytest.approx(0.1), 0.8, pytest.approx(0.1)]
    assert {tuple(tokens for tokens, _ in points) for points in answers} == {
        (99.5, 299.5, 499.5),
        (299.5, 499.5, 699.5),
        (499.5, 699.5, 899.5),
    }
    assert all([share for _, share in points] == shares for points in answers)
    [capped] = {predictor.predict(request(number, max_tokens=250)).points[-1][0] for number in range(100)}
    assert capped == 250


def test_every_draw_is_the_requests_own() -> None:
    config = PredictionConfig(accuracy=0.5, granularity=100)

    def named(seed: int, numbers: range) -> dict[int, int]:
        predictor = InaccuratePredictor(config, seed, lambda _: 0)
        return {number: predictor.name_bucket(RequestId(f"r{number}"), 450) for number in numbers}

    assert named(1, range(100)) == {**named(1, range(50, 100)), **named(1, range(50))}
    assert named(1, range(100)) != named(2, range(100))


def _mesh(**sections: Any) -> Simulated:
    """Whose decode instances have little room and reserve what is foreseen."""
    decode = pool("decode", 3, kv_tokens=4000, instance={"decode_admission": "reserve_dynamic"})
    return mesh(pool("prefill"), decode, scheduler={"decode_policy": "power_of_two"}, **sections)


def _load() -> Load:
    chance = random.Random(7)
    return Load([Offered(0.08 * number, 100, chance.choice([20, 60, 900])) for number in range(80)], 1000)


def test_a_predictor_that_is_always_right_to_the_token_is_the_oracle() -> None:
    known = simulate(_mesh(predictor={"kind": "oracle", "lengths_file": "unread"}), _load())
    right = simulate(_mesh(prediction={"accuracy": 1.0, "granularity": 1}), _load())
    assert right.records.digest() == known.records.digest()


def test_what_is_foreseen_wrongly_is_decided_otherwise_and_all_are_served() -> None:
    digests = set()
    for prediction in ({"accuracy": 1.0}, {"accuracy": 0.0}, {"accuracy": 1.0, "delay_s": 1.0}):
        simulated = _mesh(prediction=prediction | {"granularity": 400})
        metrics = measure(simulate(simulated, _load(), seed=1))
        assert metrics.done == 80
        assert metrics.digest == simulate(simulated, _load(), seed=1).records.digest()
        digests.add(metrics.digest)
    assert len(digests) == 3
    other = simulate(_mesh(prediction={"accuracy": 0.5, "granularity": 400}), _load(), seed=2)
    assert other.records.digest() not in digests


@pytest.mark.parametrize(
    ("sections", "key", "rule"),
    [
        ({"prediction": {"accuracy": 1.2}}, "prediction.accuracy", "from 0 to 1"),
        ({"prediction": {"granularity": 0}}, "prediction.granularity", "at least 1"),
        ({"prediction": {"delay_s": 3.0}}, "prediction.delay_s", "predictor.timeout_s"),
        ({"prediction": {"exactness": 1.0}}, "prediction.exactness", "is not a known key"),
        ({"prediction": {}, "predictor": {"kind": "history"}}, "predictor.kind", "left out"),
        ({"predictor": {"kind": "classifier", "directory": "x"}}, "predictor.kind", "no words"),
    ],
)
def test_a_prediction_that_makes_no_sense_is_an_error(sections: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        _mesh(**sections)
    assert caught.value.key == key
