"""Whether a scheduler may act as the leader, on its own clock and by what it hears."""

import random

from hypothesis import given
from hypothesis import strategies as st

from scheduler.lease import SAFE_SHARE, LeaderLease

LEASE_S = 2.0


def test_a_lease_ends_here_before_the_store_can_give_it_to_another() -> None:
    lease = LeaderLease(LEASE_S)
    lease.grant(1, asked_s=10.0)
    assert lease.epoch_at(10.0 + LEASE_S * SAFE_SHARE - 0.01) == 1
    assert lease.epoch_at(10.0 + LEASE_S * SAFE_SHARE) is None
    lease.grant(1, asked_s=11.0)
    assert lease.epoch_at(10.0 + LEASE_S) == 1


def test_who_hears_of_a_higher_epoch_leads_no_more() -> None:
    lease = LeaderLease(LEASE_S)
    lease.grant(5, asked_s=0.0)
    lease.hear(4)
    assert lease.epoch_at(0.0) == 5
    lease.hear(6)
    assert lease.epoch_at(0.0) is None


def test_a_grant_that_was_overtaken_on_its_way_is_none() -> None:
    lease = LeaderLease(LEASE_S)
    lease.hear(6)
    lease.grant(5, asked_s=0.0)
    assert lease.epoch_at(0.0) is None
    lease.grant(7, asked_s=0.0)
    assert lease.epoch_at(0.0) == 7


@given(st.integers(0, 1 << 32))
def test_no_two_act_at_once_however_late_the_stores_answers_are(seed: int) -> None:
    """Two schedulers and a store that gives the lease to one while nobody's runs. Its answers take any time,
    and clocks run up to a tenth of ``SAFE_SHARE``'s margin apart."""
    chance = random.Random(seed)
    rates = (1.0, chance.uniform(0.95, 1.05))
    leases = [LeaderLease(LEASE_S) for _ in rates]
    holder, until_s, epoch, now = 0, 0.0, 0, 0.0
    answers: list[tuple[float, int, int, float]] = []
    for _ in range(200):
        now += chance.expovariate(4.0)
        for answer in [each for each in answers if each[0] <= now]:
            _, who, granted, asked_s = answer
            leases[who].grant(granted, asked_s * rates[who])
            answers.remove(answer)
        acting = [who for who, lease in enumerate(leases) if lease.epoch_at(now * rates[who]) is not None]
        assert len(acting) <= 1
        asks = chance.randrange(2)
        decided_s = now + chance.expovariate(10.0)
        if asks == holder or decided_s >= until_s:
            epoch += asks != holder or decided_s >= until_s
            holder, until_s = asks, decided_s + LEASE_S
            answers.append((decided_s + chance.expovariate(3.0), asks, epoch, now))
            now = decided_s
