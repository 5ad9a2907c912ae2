"""How long the models of a mesh rest between passes that follow on one another, from what instances count."""

from collections.abc import Sequence
from typing import NamedTuple

from services.compare.engine_times import PassCounts
from services.compare.host_costs import costs_of

APART = 4.0
"""Times as many tokens a pass as in another run."""
FEWEST_TOKENS = 10
"""Fewer say nothing."""


class Rests(NamedTuple):
    """How long a model of that role rests after a pass, and more for each token that decodes drew in it and
    for each prompt that ended with it, seconds."""

    role: str = ""
    pass_s: float = 0.0
    token_s: float = 0.0
    prompt_s: float = 0.0

    def times(self, share: float) -> "Rests":
        return Rests(self.role, share * self.pass_s, share * self.token_s, share * self.prompt_s)

    def at_most(self, pass_s: float, token_s: float, prompt_s: float) -> "Rests":
        return Rests(
            self.role, min(pass_s, self.pass_s), min(token_s, self.token_s), min(prompt_s, self.prompt_s)
        )


NO_RESTS = Rests()


def fit_rests(role: str, runs: Sequence[PassCounts]) -> Rests:
    """By least squares over runs, each of which counted some: an event loop takes each token to whoever asked
    for it, and hands prompts over. Runs that draw about as many tokens a pass as each other do not tell the
    two apart, nor do fewer runs than there are kinds: then it is all passes'."""
    counts = {"pass_s": [float(each.gaps) for each in runs]}
    for name, tokens in (
        ("token_s", [float(each.decodes) for each in runs]),
        ("prompt_s", [float(each.prompts) for each in runs]),
    ):
        per_pass = [drawn / each.gaps for drawn, each in zip(tokens, runs, strict=True)]
        is_apart = max(per_pass) > APART * min(per_pass) and sum(tokens) >= FEWEST_TOKENS
        if is_apart and len(counts) < len(runs):
            counts[name] = tokens
    found = costs_of(list(zip(*counts.values(), strict=True)), [each.gap_s for each in runs])
    return Rests(role, **dict(zip(counts, found, strict=True)))
