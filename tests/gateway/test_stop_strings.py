"""Stop strings: the same result however the text is cut into pieces, and nothing held back for longer than
it could still become one."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopStrings

# Few letters, so that stop strings and their beginnings are common.
TEXT = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def earliest_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the stop string that is complete first, as one reads; the longest of those."""
    ends = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    if not ends:
        return None
    end, start = min(ends)
    return start, end


def run(pieces: Sequence[str], stops: Sequence[str], *, include: bool) -> tuple[str, bool]:
    watcher = StopStrings(stops, include_in_output=include)
    text = "".join(watcher.push(piece) for piece in pieces) + watcher.flush()
    return text, watcher.is_found


@given(st.lists(TEXT, max_size=8), STOPS, st.booleans())
def test_any_cut_of_the_text_gives_what_reading_it_letter_by_letter_gives(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    whole = "".join(pieces)
    found = earliest_stop(whole, stops)
    expected = whole
    if found is not None:
        expected = whole[: found[1] if include else found[0]]
    assert run(pieces, stops, include=include) == (expected, found is not None)


@given(TEXT, STOPS)
def test_what_is_held_back_begins_a_stop_string(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops, include_in_output=False)
    sent = watcher.push(text)
    if not watcher.is_found:
        held = watcher.flush()
        assert sent + held == text
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@given(st.lists(TEXT, max_size=8))
def test_without_stop_strings_every_piece_goes_out_at_once(pieces: list[str]) -> None:
    watcher = StopStrings([], include_in_output=False)
    assert [watcher.push(piece) for piece in pieces] == pieces
    assert watcher.flush() == ""


@pytest.mark.parametrize(("include", "expected"), [(False, "Hello"), (True, "Hello STOP")])
def test_a_stop_string_across_pieces_ends_the_text_before_or_after_it(include: bool, expected: str) -> None:
    assert run(["Hel", "lo S", "T", "OP more"], [" STOP"], include=include) == (expected, True)


def test_nothing_comes_after_a_stop_string() -> None:
    watcher = StopStrings(["x"], include_in_output=False)
    assert watcher.push("ax") == "a"
    assert watcher.push("more") == ""
    assert watcher.flush() == ""
