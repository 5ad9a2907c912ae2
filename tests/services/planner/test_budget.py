"""What a deployment may take of devices, dollars and watts."""

import pytest

from common.devices import A100_SXM, DEVICES, H100_SXM, H100_SXM_CAPPED, TPU_V6E
from common.errors import ConfigError
from services.planner.budget import Budget, Parts, budget_of

MACHINES = (A100_SXM, H100_SXM, H100_SXM_CAPPED)
A, H, CAPPED = ([(each.name, 8)] for each in MACHINES)
BASELINE = 40
"""DGX-H100s, whose power the iso-power clusters have, and whose cost the iso-cost ones (Splitwise, VI-B)."""
ISO_POWER = budget_of(MACHINES, max_power_w=BASELINE * 8 * 700)
ISO_COST = budget_of(MACHINES, max_usd_h=BASELINE * 38)


def of(parts: Parts, count: int) -> Parts:
    return [(device, count * each) for device, each in parts]


def test_splitwise_s_clusters_of_equal_power_are_what_the_budget_holds() -> None:
    """Figure 16's legend: 40 and 70 machines of one kind; HH, HA and HHcap have 25P, and AA 45P."""
    assert (ISO_POWER.most_of(H), ISO_POWER.most_of(A)) == (40, 70)
    beside = of(H, 25)
    assert [ISO_POWER.most_of(each, beside) for each in (H, A, CAPPED)] == [15, 26, 21]
    assert ISO_POWER.most_of(A, of(A, 45)) == 25


def test_of_equal_cost_there_are_twice_as_many_a100s_that_draw_a_quarter_more() -> None:
    """VI-B: twice the space, 25 % more power."""
    count = ISO_COST.most_of(A)
    assert count == 86
    assert ISO_POWER.share(of(A, count)) == pytest.approx(1.25, abs=0.03)


def test_what_just_fits_is_allowed_however_its_dollars_add_up() -> None:
    for count in range(1, 200):
        budget = budget_of(MACHINES, max_usd_h=17.6 * count)
        assert budget.most_of(A) == count
        assert budget.allows(of(A, count))
        assert not budget.allows(of(A, count + 1))
        assert budget.allows(A, count)
        assert not budget.allows(A, count + 1)


def test_the_tightest_of_several_limits_counts() -> None:
    budget = budget_of(MACHINES, max_devices=100, max_usd_h=100.0, max_power_w=10_000.0)
    assert str(budget) == "--max-gpus 100 and --max-cost 100 and --max-power 10000"
    assert (budget.most_of(A), budget.most_of(H)) == (3, 1)
    assert budget.most_of(A, H) == 1
    assert budget.most_of(H, of(A, 3)) == 0
    assert budget.gpus(A) == "8 GPUs at $17.60/h and 3,200 W"
    assert budget.least_over([of(A, 4), of(H, 2)]) == "11,200 W"


def test_without_limits_everything_is_allowed() -> None:
    assert Budget().allows(of(H, 10**9))
    assert Budget().within == ""
    assert Budget().share(H) == 0.0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("option", ["--max-cost", "--max-power"])
def test_a_limit_that_is_none_is_refused(option: str, value: float) -> None:
    usd_h, power_w = (value, None) if option == "--max-cost" else (None, value)
    with pytest.raises(ConfigError, match="over 0") as caught:
        budget_of(MACHINES, max_usd_h=usd_h, max_power_w=power_w)
    assert caught.value.key == option
    assert repr(caught.value.value) == repr(value)


def test_watts_of_what_draws_nobody_knows_how_many_are_no_budget() -> None:
    with pytest.raises(ConfigError) as caught:
        budget_of([*MACHINES, TPU_V6E], max_power_w=1_000.0)
    assert (caught.value.key, caught.value.value) == ("--max-power", 1_000.0)
    assert caught.value.rule == "nobody says what tpu-v6e draws"
    assert budget_of(list(DEVICES.values()), max_devices=8, max_usd_h=10.0).limits
