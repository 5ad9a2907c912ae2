"""A socket that cannot be had is blamed on the setting that asked for it."""

import pytest

from common.errors import ConfigError
from common.listening import Place, bind, port_of

ELSEWHERE = Place("here.host", "here.port")
NOBODYS = ("192.0.2.1", "no-such-host.invalid", "2001:db8::1")
"""Addresses for documentation, and a name that never resolves."""


def test_a_port_in_use_is_the_port_s_fault() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = port_of(listener)
        with pytest.raises(
            ConfigError, match=rf"service\.port = {port}: cannot be listened on at 127\.0\.0\.1"
        ):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", NOBODYS)
@pytest.mark.parametrize("port", [0, 8001])
def test_an_address_of_another_machine_is_the_host_s_fault(host: str, port: int) -> None:
    with pytest.raises(ConfigError) as refused:
        bind(host, port, ELSEWHERE)
    assert (refused.value.key, refused.value.value) == ("here.host", host)
    assert refused.value.rule.startswith("must be an address of this machine, or a name of one (")
    assert "while attempting" not in refused.value.rule
