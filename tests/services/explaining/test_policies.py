"""How `lamella explain --policies` shows what the schedulers added up."""

import pytest

from scheduler.regret import PolicyRegret, RegretReport
from services.explaining.policies import print_regrets


def test_a_narrow_terminal_cuts_no_policys_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    names = ("least_outstanding", "power_of_two", "round_robin")
    regrets = [PolicyRegret("decode", name, 12_345, 999, 4321.0, 543.21) for name in names]
    print_regrets(RegretReport("shortest_queue", "power_of_two", 1.0, regrets, []))
    shown = capsys.readouterr().out
    assert all(name in shown for name in names), shown
