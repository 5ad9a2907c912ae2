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


def choose_victims(held_blocks: Sequence[int], needed_blocks: int) -> list[int]:
    """Indices to preempt, latest arrival first, until ``needed_blocks`` are free.

    ``held_blocks`` are in arrival order. The oldest sequence is never chosen, so somebody always ends.
    """
    victims: list[int] = []
    freed = 0
    for index in range(len(held_blocks) - 1, 0, -1):
        if freed >= needed_blocks:
            break
        victims.append(index)
        freed += held_blocks[index]
    return victims
