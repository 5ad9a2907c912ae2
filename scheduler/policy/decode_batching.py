"""Which sequences a decode instance gives up when memory runs out; who enters is ``decode_admission``'s."""

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
