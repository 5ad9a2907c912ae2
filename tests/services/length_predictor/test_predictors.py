"""What each predictor says of a request, and what it refuses to be started with."""

import asyncio
from pathlib import Path

import pytest

from common.config import ModelConfig, PredictorConfig
from common.config_file import config_from_tree
from common.errors import ConfigError, UnknownRequest
from common.ids import RequestId
from common.messages import PredictLength
from services.length_predictor.oracle import OraclePredictor, digest_of, read_lengths
from services.length_predictor.predictors import HistoryPredictor, LengthPredictor, predictor_of


def question_of(*prompt_ids: int, max_tokens: int = 1000) -> PredictLength:
    return PredictLength(RequestId("r1"), prompt_ids, max_tokens)


def mean_of(predictor: LengthPredictor, *prompt_ids: int) -> float:
    return asyncio.run(predictor.predict(question_of(*prompt_ids))).mean


def test_history_says_what_prompts_of_like_length_drew() -> None:
    predictor = predictor_of(PredictorConfig(kind="history"), ModelConfig())
    assert isinstance(predictor, HistoryPredictor)
    for _ in range(50):
        predictor.learn(2, 10, is_cut=False)
        predictor.learn(64, 400, is_cut=False)
    assert mean_of(predictor, 1, 2) == pytest.approx(10)
    assert mean_of(predictor, *range(64)) == pytest.approx(400)


def test_the_oracle_knows_prompts_by_their_digest_and_others_in_the_order_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(
        f'{{"prompt": "{digest_of((1, 2))}", "output_tokens": 12}}\n'
        '{"output_tokens": 30}\n\n{"output_tokens": 40}\n'
    )
    predictor = predictor_of(PredictorConfig(kind="oracle", lengths_file=file), ModelConfig())
    assert isinstance(predictor, OraclePredictor)
    assert [mean_of(predictor, *ids) for ids in ((1, 2), (9,), (1, 2), (8,))] == [12, 30, 12, 40]
    with pytest.raises(UnknownRequest, match="request r1 is not in the oracle's file"):
        mean_of(predictor, 7)


def test_a_digest_is_what_its_description_says() -> None:
    """Other programs write such files, too."""
    assert digest_of((1, 22, 3)) == "fbcd60b698a9ccd3207bf6f938e1e3a4"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "line 2 is no known length"),
        ('{"prompt": "a"}', "line 2 is no known length"),
        ('{"output_tokens": 0}', "line 2: output_tokens must be at least 1"),
    ],
)
def test_a_broken_line_of_the_oracle_s_file_is_named(tmp_path: Path, line: str, rule: str) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(f'{{"output_tokens": 3}}\n{line}\n')
    with pytest.raises(ConfigError, match=rule) as caught:
        read_lengths(file)
    assert caught.value.key == "predictor.lengths_file"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_lengths(tmp_path / "none")


@pytest.mark.parametrize(
    ("kind", "key"), [("oracle", "predictor.lengths_file"), ("classifier", "predictor.directory")]
)
def test_a_predictor_without_what_it_needs_is_refused(kind: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"must be set with predictor.kind = '{kind}'") as caught:
        config_from_tree({"predictor": {"kind": kind}})
    assert caught.value.key == key


def test_a_service_that_is_to_predict_nothing_does_not_start() -> None:
    with pytest.raises(ConfigError, match="must be history, classifier or oracle here"):
        predictor_of(PredictorConfig(), ModelConfig())
