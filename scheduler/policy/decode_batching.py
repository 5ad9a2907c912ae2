"""Which sequences a decode instance takes in, and which it gives up when memory runs out.

Greedy admission (TetriInfer 3.4, vLLM's way): a sequence enters when its blocks fit now and one block of
head-room per running sequence stays free; growth beyond that preempts.
"""

from collections.abc import Sequence


def can_admit(
    free_blocks: int, needed_blocks: int, running: int, max_batch: int, blocks_per_growth: int
) -> bool:
    """Whether one more sequence enters. ``blocks_per_growth`` is the head-room kept per running sequence."""
    if running >= max_batch:
        return False
    if running == 0:
        return needed_blocks <= free_blocks
    return needed_blocks + running * blocks_per_growth <= free_blocks


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
