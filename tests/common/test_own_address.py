"""Which addresses are this machine's, and what is made of one that is not any more."""

import asyncio

import pytest

from common.own_address import AddressLost, is_own, watch_own_addresses

HERE, NEVER_HERE = "127.0.0.1", "192.0.2.1"
BUS_URL, UNREACHABLE = "nats://127.0.0.1:4222", "nats://nowhere.invalid"


def test_only_addresses_of_this_machine_are_its_own() -> None:
    assert is_own(HERE)
    assert not any(map(is_own, (NEVER_HERE, "localhost", "")))


def test_an_address_that_never_was_this_machine_s_is_not_watched() -> None:
    asyncio.run(watch_own_addresses((NEVER_HERE, "some-name"), BUS_URL, 0.0))


def test_an_address_that_is_gone_ends_the_process_once_the_bus_is_reached_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter((True, True, False))
    monkeypatch.setattr("common.own_address.is_own", lambda host: next(looks))
    with pytest.raises(AddressLost, match=r"were told 10\.1\.2\.3, and this machine is at 127\.0\.0\.1 now"):
        asyncio.run(watch_own_addresses(("10.1.2.3",), BUS_URL, 0.0))


def test_a_machine_that_is_cut_off_may_get_its_address_back(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter((True, False, False, True, False))
    monkeypatch.setattr("common.own_address.is_own", lambda host: next(looks))

    async def watch() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await watch_own_addresses(("10.1.2.3",), UNREACHABLE, 0.0)

    asyncio.run(watch())
    assert next(looks, None) is None
