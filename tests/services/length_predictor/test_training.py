"""The classifier learns what a prompt says of its output's length, and says honestly how well."""

import asyncio
import random
from pathlib import Path

import pytest
import torch

from common.config import ModelConfig, PredictorConfig
from common.errors import ConfigError, InvalidRequest
from common.ids import RequestId
from common.messages import PredictLength
from services.length_predictor.buckets import accuracy_of, bucket_of, buckets_for, commonest, mean_lengths
from services.length_predictor.confusion import write_confusion
from services.length_predictor.engine import SHAPE_FILE, WEIGHTS_FILE, LengthClassifier, save_encoder
from services.length_predictor.predictors import predictor_of
from services.length_predictor.training import TRAININGS, Recipe, Sample, Trained, train
from services.model_directory import model_directory, model_identity
from tests.common.model.conftest import MakeTiny

VOCABULARY = 64
LENGTH_OF_WORD = {5: 30, 6: 250, 7: 460}
"""A prompt with that token draws about so much."""
MODEL = ModelConfig()


def settings_of(directory: Path) -> PredictorConfig:
    return PredictorConfig(kind="classifier", directory=directory)


def samples_of(count: int, seed: int = 3) -> list[Sample]:
    draw = random.Random(seed)
    samples = []
    for _ in range(count):
        word = draw.choice((*LENGTH_OF_WORD, 6))
        ids = [draw.randrange(10, VOCABULARY) for _ in range(draw.randint(4, 12))]
        ids.insert(draw.randrange(len(ids)), word)
        samples.append(Sample(tuple(ids), LENGTH_OF_WORD[word] + draw.randrange(30)))
    return samples


def recipe_of(target: str, epochs: int) -> Recipe:
    return Recipe(target=target, vocab_size=VOCABULARY, granularity=200, max_tokens=600, epochs=epochs)


@pytest.fixture(scope="module")
def trained() -> Trained:
    losses: dict[int, float] = {}
    epochs = 12
    recipe = recipe_of(model_identity(model_directory(MODEL)), epochs)
    result = train(samples_of(200), recipe, losses.__setitem__)
    firsts = set(range(1, TRAININGS * epochs, epochs))
    assert firsts < set(losses) <= set(range(1, TRAININGS * epochs + 1))
    return result


def test_lengths_that_a_prompt_gives_away_are_learned_beyond_the_commonest_bucket(trained: Trained) -> None:
    assert [each.granularity for each in trained.accuracies] == [100, 200, 400]
    for each in trained.accuracies:
        assert each.prompts == 200
        assert each.right - each.gain_error > each.commonest + 0.1, each
    assert sum(map(sum, trained.confusion)) == 200
    assert trained.learned == 200


def test_what_was_trained_is_saved_without_pickle_and_predicts(trained: Trained, tmp_path: Path) -> None:
    save_encoder(trained.encoder, tmp_path / "model")
    assert {each.name for each in (tmp_path / "model").iterdir()} == {WEIGHTS_FILE, SHAPE_FILE}
    predictor = predictor_of(settings_of(tmp_path / "model"), MODEL)
    try:
        for word, length in LENGTH_OF_WORD.items():
            question = PredictLength(RequestId("r"), (20, word, 30, 31), 1000)
            lengths = asyncio.run(predictor.predict(question))
            assert sum(probability for _, probability in lengths.points) == pytest.approx(1)
            assert abs(lengths.mean - length) < 120, (word, lengths)
        with pytest.raises(InvalidRequest, match="trained for another model"):
            asyncio.run(predictor.predict(PredictLength(RequestId("r"), (VOCABULARY,), 10)))
    finally:
        predictor.close()


def test_a_prompt_longer_than_the_window_is_read_at_both_its_ends(trained: Trained) -> None:
    """The task stands before or behind what it is about."""
    classifier = LengthClassifier(trained.encoder)
    half = (20,) * trained.encoder.shape.window
    for short, tokens in LENGTH_OF_WORD.items():
        before, amid, behind = (
            classifier.predict(prompt)
            for prompt in ((short, *half, *half), (*half, short, *half), (*half, *half, short))
        )
        without = classifier.predict((*half, 20, *half))
        assert amid == without
        assert before != without, tokens
        assert behind != without, tokens


def test_filling_up_a_batch_changes_no_prompt_s_prediction(trained: Trained) -> None:
    from services.length_predictor.engine import as_batch

    encoder = trained.encoder.eval()
    short, long = (20, 5, 21), tuple(range(10, 50))
    with torch.inference_mode():
        together = encoder(*as_batch(encoder.shape, [short, long]))
        alone = encoder(*as_batch(encoder.shape, [short]))
    for both, one in zip(together, alone, strict=True):
        torch.testing.assert_close(both[0], one[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("broken", [SHAPE_FILE, WEIGHTS_FILE])
def test_a_directory_without_a_whole_classifier_is_refused(
    trained: Trained, tmp_path: Path, broken: str
) -> None:
    settings = settings_of(tmp_path)
    with pytest.raises(ConfigError, match="holds no trained length classifier"):
        predictor_of(settings, MODEL)
    save_encoder(trained.encoder, tmp_path)
    (tmp_path / broken).write_text("{}")
    with pytest.raises(ConfigError, match="holds no trained length classifier") as caught:
        predictor_of(settings, MODEL)
    assert caught.value.key == "predictor.directory"


def test_a_classifier_of_another_models_outputs_is_refused(
    trained: Trained, tmp_path: Path, tiny: MakeTiny
) -> None:
    save_encoder(trained.encoder, tmp_path)
    other = ModelConfig(directory=tiny("llama").directory)
    with pytest.raises(ConfigError, match=r"was trained on the outputs of SmolLM2.* is served: train one"):
        predictor_of(settings_of(tmp_path), other)


def test_too_few_prompts_are_refused() -> None:
    few = [*samples_of(19), *samples_of(19)]
    with pytest.raises(ConfigError, match="must be at least 20 different prompts"):
        train(few, recipe_of("any", epochs=1))


def test_buckets_count_from_zero_and_the_last_one_holds_what_is_longer() -> None:
    assert [bucket_of(tokens, 200, 450) for tokens in (1, 199, 200, 450, 9000)] == [0, 0, 1, 2, 2]
    assert buckets_for(200, 450) == 3
    assert commonest([2, 1, 2, 1, 0]) == 1
    assert mean_lengths([10, 20, 600], 200, 450) == (15.0, 300.0, 450.0)
    found = accuracy_of(200, [0, 0, 1, 2], [0, 1, 1, 2], [0, 0, 0, 0])
    assert (found.right, found.commonest, found.prompts) == (0.75, 0.5, 4)


def test_a_gain_is_as_sure_as_the_prompts_are_many_on_which_the_two_differ() -> None:
    same = accuracy_of(200, [0, 1] * 50, [0, 0] * 50, [0, 0] * 50)
    assert same.gain_error == 0.0
    few, many = (accuracy_of(200, [0, 1] * half, [0, 1] * half, [0, 0] * half) for half in (50, 5000))
    assert few.right - few.commonest == 0.5
    assert few.gain_error == pytest.approx(1.96 * 0.5 / 10)
    assert many.gain_error == pytest.approx(few.gain_error / 10)


def test_the_confusion_is_drawn(tmp_path: Path) -> None:
    write_confusion(tmp_path / "confusion.png", [[3, 1], [0, 2]], 200)
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
