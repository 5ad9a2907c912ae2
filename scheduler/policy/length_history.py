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
    """By bin, in the order in which they were first seen: weight, and weight times length."""

    bins: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    weight: float = 0.0

    def add(self, tokens: int, is_cut: bool) -> None:
        self.weights = weights = [weight * FORGETTING for weight in self.weights]
        self.totals = totals = [total * FORGETTING for total in self.totals]
        if weights and min(weights) <= LEAST_WEIGHT:
            self._forget()
            weights, totals = self.weights, self.totals
        bin_of, bins = tokens // BIN_TOKENS, self.bins
        further = [place for place, each in enumerate(bins) if each > bin_of] if is_cut else []
        if further:
            grown = 1 + 1 / sum([weights[place] for place in further], 0.0)
            for place in further:
                weights[place] *= grown
                totals[place] *= grown
        elif bin_of in bins:
            place = bins.index(bin_of)
            weights[place] += 1.0
            totals[place] += tokens
        else:
            bins.append(bin_of)
            weights.append(1.0)
            totals.append(0.0 + tokens)
        self.weight = sum(weights, 0.0)

    def _forget(self) -> None:
        """Bins in which nobody has fallen for long."""
        kept = [place for place, weight in enumerate(self.weights) if weight > LEAST_WEIGHT]
        self.bins = [self.bins[place] for place in kept]
        self.weights = [self.weights[place] for place in kept]
        self.totals = [self.totals[place] for place in kept]


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
        bins, weights, totals = own.bins, own.weights, own.totals
        if share > 0:
            bins, weights, totals = [*bins], [*weights], [*totals]
            places = {each: place for place, each in enumerate(bins)}
            for each, more, total in zip(everything.bins, everything.weights, everything.totals, strict=True):
                place = places.get(each)
                if place is None:
                    place = places[each] = len(bins)
                    bins.append(each)
                    weights.append(0.0)
                    totals.append(0.0)
                weights[place] += share * more
                totals[place] += share * total
        whole = sum(weights, 0.0)
        return LengthDistribution(
            tuple(
                [
                    (total / weight, weight / whole)
                    for _, weight, total in sorted(zip(bins, weights, totals, strict=True))
                ]
            )
        )


def _class_of(prompt_tokens: int) -> int:
    return min(CLASSES - 1, max(1, prompt_tokens).bit_length() - 1)
