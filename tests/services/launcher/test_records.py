"""Which instances a supervisor counts where a mesh is scaled."""

from pathlib import Path

import msgspec

from common.messages import InstanceRecord, Role
from services.launcher.children import Child
from services.launcher.records import home_of
from tests.scheduler.states import record_of

CHILD = Child("decode-0", "decode", ("lamella",), {}, Path("decode-0.log"))


def with_roles(role: Role, home: Role | None) -> InstanceRecord:
    return msgspec.structs.replace(record_of("decode-0", role), home=home)


def test_an_instance_that_a_role_policy_has_changed_is_what_was_bought() -> None:
    """`lamella scale decode=1` started another one beside it, which was one too many once it went home."""
    assert home_of(CHILD, with_roles("mixed", "decode")) == "decode"


def test_one_that_was_flipped_for_good_is_what_it_was_made() -> None:
    assert home_of(CHILD, with_roles("prefill", "prefill")) == "prefill"
    assert home_of(CHILD, with_roles("prefill", None)) == "prefill"


def test_one_that_has_not_come_up_is_what_it_was_started_as() -> None:
    assert home_of(CHILD, None) == "decode"
