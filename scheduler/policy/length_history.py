"""Output lengths given the prompt's length, from history (Aladdin, 2.3): updated online, unbiased.

Prompts of like length, each class twice as wide as the one before, share a histogram whose bins keep the mean
of what fell into them: so the mean of the distribution is exactly the mean of what was seen. Old requests are
slowly forgotten. A class that has seen little borrows from all prompts. A request that its ``max_tokens`` cut
short counts as those that got further did (Kaplan and Meier's redistribution to the right), where any has.
"""

from dataclasses import dataclass, field

from common.lengths import LengthDistribution, certain

CLASSES = 20
"""Prompts of 1, 2..3, 4..7, … tokens."""
BIN_TOKENS = 32
FORGETTING = 0.999
"""Weight of a request after the next one of its class: half after some 700."""
BORROWED = 8.0
"""Requests of any prompt that count beside a class's own."""
LEAST_WEIGHT = 1e-3


@dataclass(slots=True)
class _Histogram:
    """By bin: weight, and weight times length."""

    weights: dict[int, float] = field(default_factory=dict)
    totals: dict[int, float] = field(default_factory=dict)
    weight: float = 0.0

    def add(self, tokens: int, is_cut: bool) -> None:
        weights = {place: weight * FORGETTING for place, weight in self.weights.items()}
        totals = {place: total * FORGETTING for place, total in self.totals.items()}
        if weights and min(weights.values()) <= LEAST_WEIGHT:
            for place in [place for place, weight in weights.items() if weight <= LEAST_WEIGHT]:
                del weights[place], totals[place]
        bin_of = tokens // BIN_TOKENS
        further = [place for place in weights if place > bin_of] if is_cut else []
        if further:
            grown = 1 + 1 / sum([weights[place] for place in further], 0.0)
            for place in further:
                weights[place] *= grown
                totals[place] *= grown
        else:
            weights[bin_of] = weights.get(bin_of, 0.0) + 1.0
            totals[bin_of] = totals.get(bin_of, 0.0) + tokens
        self.weights, self.totals, self.weight = weights, totals, sum(weights.values(), 0.0)


@dataclass(slots=True)
class LengthHistory:
    """``unseen``: what is said before any request has ended."""

    unseen: LengthDistribution = field(default_factory=lambda: certain(256))
    _everything: _Histogram = field(default_factory=_Histogram)
    _classes: dict[int, _Histogram] = field(default_factory=dict)
    _predicted: dict[int, LengthDistribution] = field(default_factory=dict)

    def add(self, prompt_tokens: int, output_tokens: int, *, is_cut: bool = False) -> None:
        """A request has ended by itself, or was cut. One that its client left early says nothing."""
        self._predicted.clear()
        self._everything.add(output_tokens, is_cut)
        self._classes.setdefault(_class_of(prompt_tokens), _Histogram()).add(output_tokens, is_cut)

    def predict(self, prompt_tokens: int) -> LengthDistribution:
        """Made once of each class for each request that ended: a placement asks several times."""
        if self._everything.weight == 0:
            return self.unseen
        prompt_class = _class_of(prompt_tokens)
        if prompt_class not in self._predicted:
            self._predicted[prompt_class] = self._predict(prompt_class)
        return self._predicted[prompt_class]

    def _predict(self, prompt_class: int) -> LengthDistribution:
        everything = self._everything
        own = self._classes.get(prompt_class, _Histogram())
        share = min(1.0, BORROWED / everything.weight) if own.weight < BORROWED else 0.0
        weights, totals = own.weights, own.totals
        if share > 0:
            weights, totals = {**weights}, {**totals}
            for place, weight in everything.weights.items():
                weights[place] = weights.get(place, 0.0) + share * weight
                totals[place] = totals.get(place, 0.0) + share * everything.totals[place]
        weight = sum(weights.values(), 0.0)
        return LengthDistribution(
            tuple([(totals[place] / weights[place], weights[place] / weight) for place in sorted(weights)])
        )


def _class_of(prompt_tokens: int) -> int:
    return min(CLASSES - 1, max(1, prompt_tokens).bit_length() - 1)
