"""Which flips of an instance's role the command refuses."""

import pytest

from common.messages import MemberRecord, Role
from services.flip import FlipRefused, check_flip
from tests.scheduler.states import gateway_record, record_of

TWO_AND_ONE: list[MemberRecord] = [
    gateway_record(),
    record_of("prefill-0", "prefill"),
    record_of("decode-0", "decode"),
    record_of("decode-1", "decode"),
]


@pytest.mark.parametrize(
    ("name", "role", "why"),
    [
        ("decode-7", "prefill", "no instance decode-7; registered: decode-0, decode-1, prefill-0"),
        ("gateway-0", "prefill", "no instance gateway-0"),
        ("decode-1", "decode", "decode-1 is a decode instance already"),
        ("prefill-0", "decode", "the last prefill instance.*--force"),
    ],
)
def test_a_flip_that_makes_no_sense_is_refused_with_the_reason(name: str, role: Role, why: str) -> None:
    with pytest.raises(FlipRefused, match=why):
        check_flip(TWO_AND_ONE, name, role, force=False)


def test_a_mixed_instance_can_stand_in_for_the_last_of_a_role_and_may_become_the_last() -> None:
    mixed = record_of("mixed-0", "mixed")
    check_flip([*TWO_AND_ONE, mixed], "prefill-0", "decode", force=False)
    check_flip(TWO_AND_ONE, "prefill-0", "mixed", force=False)
    check_flip([mixed], "mixed-0", "prefill", force=True)
    with pytest.raises(FlipRefused, match="mixed-0 is the last decode instance"):
        check_flip([mixed], "mixed-0", "prefill", force=False)


def test_one_of_several_is_flipped_and_the_last_one_by_force() -> None:
    check_flip(TWO_AND_ONE, "decode-1", "prefill", force=False)
    check_flip(TWO_AND_ONE, "prefill-0", "decode", force=True)
