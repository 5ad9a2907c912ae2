"""Transfers over links: how long one takes, and how several share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.simulator.clock import Clock
from services.simulator.links import Flow, Link, Links, fair_rates


def test_a_transfer_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    clock = Clock()
    links, ended = Links(clock, latency_s=0.5), []
    links.send((Link(100.0), Link(50.0)), 200.0, lambda: ended.append(clock.now))
    clock.run_until(100.0)
    assert ended == [4.5]


def test_two_transfers_share_a_link_and_the_last_one_has_it_alone() -> None:
    clock = Clock()
    links, shared, ended = Links(clock), Link(100.0), []
    links.send((shared, Link(1e9)), 100.0, lambda: ended.append(("short", clock.now)))
    links.send((shared, Link(1e9)), 300.0, lambda: ended.append(("long", clock.now)))
    clock.run_until(100.0)
    assert ended == [("short", 2.0), ("long", 4.0)]
    assert shared.carried_bytes == 400.0


def test_what_a_slow_receiver_leaves_others_have() -> None:
    clock = Clock()
    links, shared, ended = Links(clock), Link(100.0), []
    links.send((shared, Link(20.0)), 40.0, lambda: ended.append(("slow", clock.now)))
    links.send((shared, Link(1e9)), 160.0, lambda: ended.append(("fast", clock.now)))
    clock.run_until(100.0)
    assert ended == [("slow", 2.0), ("fast", 2.0)]


@given(
    st.lists(st.floats(1.0, 1e3), min_size=2, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12),
)
def test_rates_are_max_min_fair(bandwidths: list[float], ends: list[tuple[int, int]]) -> None:
    """No link carries more than it can, and each transfer crosses a full link where none has more."""
    links = [Link(each) for each in bandwidths]
    flows = []
    for begin, end in ends:
        pair = dict.fromkeys([links[begin % len(links)], links[end % len(links)]])
        flow = Flow(tuple(pair), 1.0, 0.0, lambda: None)
        flows.append(flow)
        for link in flow.links:
            link.flows[flow] = None
    used = dict.fromkeys(link for flow in flows for link in flow.links)
    rates = fair_rates(dict.fromkeys(flows), used)
    for link in used:
        assert sum(rates[flow] for flow in link.flows) <= link.bytes_per_s * (1 + 1e-9)
    for flow in flows:
        full = [
            link
            for link in flow.links
            if sum(rates[each] for each in link.flows) == pytest.approx(link.bytes_per_s)
        ]
        assert any(rates[flow] >= max(rates[each] for each in link.flows) * (1 - 1e-9) for link in full)


@pytest.mark.parametrize("deadline_s", [2.0, 1e9])
def test_what_did_not_cross_a_link_was_not_carried(deadline_s: float) -> None:
    """One of two ends: of 600 bytes and 1,000 at 50 a second each 100 of each have crossed."""
    clock = Clock()
    links = Links(clock, deadline_s=deadline_s)
    ended, shared, other = (Link(100.0) for _ in range(3))
    links.send((ended, shared), 600.0, lambda: None)
    links.send((other, shared), 1000.0, lambda: None)
    if deadline_s > 2.0:
        clock.at(2.0, lambda: links.end(ended))
    clock.run_until(2.0)
    assert ended.carried_bytes == pytest.approx(100.0)
    assert shared.carried_bytes == pytest.approx(200.0 if deadline_s == 2.0 else 1100.0)
