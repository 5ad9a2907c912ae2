"""Who says how long outputs will be: one Protocol; history behind it, and the choice among all of them."""

from dataclasses import dataclass, field
from typing import Protocol

from common.config import ModelConfig, PredictorConfig
from common.engine_thread import EngineThread
from common.errors import ConfigError
from common.lengths import LengthDistribution
from common.messages import PredictLength
from scheduler.policy.length_history import LengthHistory
from services.length_predictor.classifier import ClassifierPredictor
from services.length_predictor.oracle import OraclePredictor, read_lengths
from services.model_directory import model_directory, model_identity


class LengthPredictor(Protocol):
    async def predict(self, question: PredictLength) -> LengthDistribution:
        """Of the whole output, which ``max_tokens`` may still cut short. Raises RequestError."""
        ...

    def learn(self, prompt_tokens: int, output_tokens: int, *, is_cut: bool) -> None:
        """A request has come to its own end, or was cut there by its ``max_tokens``."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class HistoryPredictor:
    """What prompts of like length have drawn: what the scheduler falls back to, too."""

    lengths: LengthHistory = field(default_factory=LengthHistory)

    async def predict(self, question: PredictLength) -> LengthDistribution:
        return self.lengths.predict(len(question.prompt_ids))

    def learn(self, prompt_tokens: int, output_tokens: int, *, is_cut: bool) -> None:
        self.lengths.add(prompt_tokens, output_tokens, is_cut=is_cut)

    def close(self) -> None:
        """Holds nothing."""


def predictor_of(settings: PredictorConfig, model: ModelConfig) -> LengthPredictor:
    """The one that is configured, for that model's outputs. Raises ConfigError where it cannot be had."""
    match settings.kind:
        case "history":
            return HistoryPredictor()
        case "oracle":
            assert settings.lengths_file is not None, "checked when the settings were read"
            return OraclePredictor(read_lengths(settings.lengths_file))
        case "classifier":
            assert settings.directory is not None, "checked when the settings were read"
            # Only now: it loads torch, which the others do without.
            from services.length_predictor.engine import load_classifier

            served = model_identity(model_directory(model))
            classifier = load_classifier(settings.directory, served)
            return ClassifierPredictor(classifier, EngineThread(name="predictor"))
        case "none":
            raise ConfigError("predictor.kind", settings.kind, "must be history, classifier or oracle here")
