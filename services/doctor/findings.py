"""What an examination finds: words only, for the terminal and for programs."""

from typing import Literal

import msgspec

Verdict = Literal["good", "note", "problem"]
"""note: works, and could be better or is only needed elsewhere. problem: what was asked for will not work."""


class Finding(msgspec.Struct, frozen=True):
    """``seen`` is what is there; ``advice`` what to do, None where there is nothing to do."""

    subject: str
    verdict: Verdict
    seen: str
    advice: str | None = None


def good(subject: str, seen: str) -> Finding:
    return Finding(subject, "good", seen)


def note(subject: str, seen: str, advice: str) -> Finding:
    return Finding(subject, "note", seen, advice)


def problem(subject: str, seen: str, advice: str) -> Finding:
    return Finding(subject, "problem", seen, advice)
