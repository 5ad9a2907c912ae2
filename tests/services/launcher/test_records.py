"""Which instances a supervisor counts where a mesh is scaled."""

from pathlib import Path

import msgspec

from common.ids import new_incarnation
from common.messages import InstanceRecord, Role, ServiceRecord
from services.launcher.children import Child
from services.launcher.records import home_of, process_status
from services.launcher.state_directory import ProcessIdentity
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


def test_a_further_gateways_private_port_is_told_of() -> None:
    """It chooses a free one, which only its record says."""
    identity = ProcessIdentity("gateway-1", "gateway", 12, 1)
    child = Child("gateway-1", "gateway", ("lamella",), {}, Path("gateway-1.log"), identity=identity)
    record = ServiceRecord(
        service_id="gateway-1",
        incarnation=new_incarnation(),
        kind="gateway",
        host="127.0.0.1",
        pid=12,
        http_url="http://127.0.0.1:3",
        private_url="http://127.0.0.1:4",
    )
    shown = process_status(child, "ready", {"gateway-1": record})
    assert (shown.url, shown.private_url, shown.state) == (record.http_url, record.private_url, "ready")
    before = process_status(child, "starting", {"gateway-1": msgspec.structs.replace(record, pid=11)})
    assert (before.url, before.private_url) == (None, None)
