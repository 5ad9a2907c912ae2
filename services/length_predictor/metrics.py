"""What a length predictor counts: its answers, and how right they were."""

from prometheus_client import CollectorRegistry

from common.telemetry import Instruments


class PredictorMetrics:
    """How often, how fast and how rightly lengths are predicted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        count = Instruments(registry).count
        self._predictions = count("length_predictions", "Answered.")
        self._seconds = count("length_prediction_seconds", "Time from question to answer.")
        self._refusals = count("length_prediction_refusals", "Not answered: too many questions at once.")
        self._outcomes = count("length_prediction_outcomes", "Answered, and the output came to its own end.")
        self._error_tokens = count(
            "length_prediction_error_tokens", "By how much the predicted means of these were wrong, in all."
        )

    def observe_prediction(self, elapsed_s: float) -> None:
        self._predictions.inc()
        self._seconds.inc(elapsed_s)

    def refused(self) -> None:
        self._refusals.inc()

    def observe_outcome(self, error_tokens: float) -> None:
        self._outcomes.inc()
        self._error_tokens.inc(abs(error_tokens))
