"""How the commands for a local mesh show it."""

import pytest

from services.commands.mesh import print_status
from services.launcher.control import LeaderStatus, MeshStatus, ProcessStatus

URL = "http://127.0.0.1:34769"


def test_a_narrow_terminal_cuts_no_url(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    process = ProcessStatus("scheduler-0", "scheduler", 12345, "running", url=URL)
    print_status(MeshStatus("ready", None, [], [process], leader=LeaderStatus("scheduler-0", 3)))
    assert URL in capsys.readouterr().out


def test_every_gateways_page_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    gateways = [
        ProcessStatus(f"gateway-{number}", "gateway", 1, "running", url=URL, private_url=f"http://g:{number}")
        for number in (0, 1)
    ]
    print_status(MeshStatus("ready", URL, [], gateways))
    shown = capsys.readouterr().out
    assert "http://g:0/ui/" in shown
    assert "http://g:1/ui/" in shown
