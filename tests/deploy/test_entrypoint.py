"""The container's first process: its own address, found without being told."""

import socket

import pytest

from common.errors import ConfigError
from common.own_address import own_address
from deploy.entrypoint import with_own_address, with_own_name


def test_the_address_towards_a_bus_on_this_machine_is_loopback() -> None:
    assert own_address("nats://127.0.0.1:4222") == "127.0.0.1"


def test_credentials_and_a_missing_port_do_not_matter() -> None:
    assert own_address("nats://user:secret@127.0.0.1") == "127.0.0.1"


def test_both_addresses_are_filled_in_and_others_kept() -> None:
    environment = with_own_address({"NATS_URL": "nats://127.0.0.1:4222", "LAMELLA_PORT": "8000"})
    assert environment == {
        "NATS_URL": "nats://127.0.0.1:4222",
        "LAMELLA_PORT": "8000",
        "LAMELLA_ADVERTISE_HOST": "127.0.0.1",
        "LAMELLA_TRANSFER_HOST": "127.0.0.1",
    }


def test_an_address_that_is_given_stays() -> None:
    given = {"NATS_URL": "nats://127.0.0.1", "LAMELLA_ADVERTISE_HOST": "10.1.2.3"}
    environment = with_own_address(given)
    assert environment["LAMELLA_ADVERTISE_HOST"] == "10.1.2.3"
    assert environment["LAMELLA_TRANSFER_HOST"] == "127.0.0.1"


def test_with_both_given_the_bus_is_not_even_looked_up() -> None:
    given = {
        "NATS_URL": "nats://nowhere.invalid",
        "LAMELLA_ADVERTISE_HOST": "10.1.2.3",
        "LAMELLA_TRANSFER_HOST": "10.1.2.4",
    }
    assert with_own_address(given) == given


def test_an_unknown_bus_is_named_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"NATS_URL.*nowhere\.invalid") as caught:
        own_address("nats://user:secret@nowhere.invalid:4222")
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value.__cause__, socket.gaierror)


def test_a_service_is_named_by_its_role_and_its_container_unless_it_has_a_name() -> None:
    assert with_own_name({}, "decode", "0f8a7a8a0d5c") == {"LAMELLA_SERVICE_ID": "decode-0f8a7a8a0d5c"}
    given = {"LAMELLA_SERVICE_ID": "decode-5d7c9b6f4-x2x4k"}
    assert with_own_name(given, "decode", "0f8a7a8a0d5c") == given
    assert with_own_name({}, "decode", "A.host") == {}
