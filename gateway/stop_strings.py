"""Stop strings in a stream: text is held back exactly as long as it could still become one.

The stop string that is complete first, as one reads, ends the text (the longest, where several end at the
same letter), so the result does not depend on how the text was cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """Looks for ``strings`` in text that comes in pieces of any size."""

    def __init__(self, strings: Sequence[str], *, include_in_output: bool) -> None:
        self._strings = [string for string in strings if string]
        self._include_in_output = include_in_output
        self._held = ""
        self.has_any = bool(self._strings)
        self.is_found = False

    def push(self, text: str) -> str:
        """Text that may be sent now. Once ``is_found``, nothing more comes."""
        if not self.has_any:
            return text
        if self.is_found:
            return ""
        held = self._held + text
        found = [(start + len(stop), start) for stop in self._strings if (start := held.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.is_found = True
            self._held = ""
            return held[: end if self._include_in_output else start]
        keep = max(_overlap(held, stop) for stop in self._strings)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
