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

    bins: dict[int, tuple[float, float]] = field(default_factory=dict)
    weight: float = 0.0

    def add(self, tokens: int, is_cut: bool) -> None:
        kept = {}
        for place, (weight, total) in self.bins.items():
            if weight * FORGETTING > LEAST_WEIGHT:
                kept[place] = (weight * FORGETTING, total * FORGETTING)
        further = [place for place in kept if place > tokens // BIN_TOKENS] if is_cut else []
        if further:
            grown = 1 + 1 / sum(kept[place][0] for place in further)
            kept |= {place: (kept[place][0] * grown, kept[place][1] * grown) for place in further}
        else:
            weight, total = kept.get(tokens // BIN_TOKENS, (0.0, 0.0))
            kept[tokens // BIN_TOKENS] = (weight + 1.0, total + tokens)
        self.bins = kept
        self.weight = sum(weight for weight, _ in kept.values())


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
        found: dict[int, tuple[float, float]] = {}
        for histogram, factor in ((own, 1.0), (everything, share)):
            for place, (weight, total) in histogram.bins.items():
                before = found.get(place, (0.0, 0.0))
                found[place] = (before[0] + factor * weight, before[1] + factor * total)
        weight = sum(each for each, _ in found.values())
        return LengthDistribution(
            tuple((total / each, each / weight) for _, (each, total) in sorted(found.items()) if each > 0)
        )


def _class_of(prompt_tokens: int) -> int:
    return min(CLASSES - 1, max(1, prompt_tokens).bit_length() - 1)
