"""What a receiver of leaders' commands lets pass."""

import pytest

from common.epochs import EpochFence
from common.errors import LeaderSuperseded


def test_an_epoch_below_the_highest_seen_is_refused() -> None:
    fence = EpochFence()
    fence.admit(5)
    fence.admit(5)
    fence.note(7)
    with pytest.raises(LeaderSuperseded, match="epoch 5 is over: a scheduler leads with epoch 7"):
        fence.admit(5)
    fence.note(3)
    fence.admit(7)
    assert fence.highest == 7


def test_a_person_commands_whoever_leads() -> None:
    fence = EpochFence(highest=9)
    fence.admit(None)
    assert fence.highest == 9
