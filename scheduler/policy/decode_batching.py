"""Which sequences a decode instance gives up when memory runs out, and whom a step computes where it may not
compute all; who enters is ``decode_admission``'s."""

from collections.abc import Sequence


def choose_victims(relief_blocks: Sequence[int], missing_blocks: int) -> list[int]:
    """Indices to preempt, latest arrival first, until ``missing_blocks`` are made up for.

    ``relief_blocks``, in arrival order, is by how much each one's end lessens what is missing. The
    oldest sequence is never chosen, so somebody always ends.
    """
    victims: list[int] = []
    relieved = 0
    for index in range(len(relief_blocks) - 1, 0, -1):
        if relieved >= missing_blocks:
            break
        victims.append(index)
        relieved += relief_blocks[index]
    return victims


def choose_in_turn(context_tokens: Sequence[int], turns: Sequence[int], most_tokens: int) -> list[int]:
    """Indices of those in the next step, in the order of their ``turns`` (of several alike the first comes
    first), until the next one's context is too much. One alone may have more."""
    chosen: list[int] = []
    tokens = 0
    for index in sorted(range(len(turns)), key=lambda index: turns[index]):
        tokens += context_tokens[index]
        if chosen and tokens > most_tokens:
            break
        chosen.append(index)
    return chosen
