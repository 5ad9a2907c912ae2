"""The trained classifier behind the predictors' Protocol. Its computing has a thread of its own."""

from dataclasses import dataclass
from typing import Protocol

from common.engine_thread import EngineThread
from common.lengths import LengthDistribution
from common.messages import PredictLength


class Classifier(Protocol):
    """``engine.LengthClassifier``, which loads torch."""

    def predict(self, prompt_ids: tuple[int, ...]) -> LengthDistribution: ...


@dataclass(slots=True)
class ClassifierPredictor:
    classifier: Classifier
    engine: EngineThread

    async def predict(self, question: PredictLength) -> LengthDistribution:
        """Raises InvalidRequest for tokens of another model."""
        return await self.engine.run(self.classifier.predict, question.prompt_ids)

    def learn(self, prompt_tokens: int, output_tokens: int, *, is_cut: bool) -> None:
        """It was trained before, and is not trained on."""

    def close(self) -> None:
        self.engine.close()
