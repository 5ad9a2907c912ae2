"""Ends runs that cannot be served any more: under twice its load a simulated mesh takes long to say so."""

import numpy as np
from numpy.typing import NDArray

from common.latency import ServiceObjectives
from services.planner.probes import Point
from services.simulator.cluster import Cluster
from services.simulator.metrics import DONE
from services.simulator.records import OUTCOMES

OPEN = OUTCOMES.index("open")
Missed = NDArray[np.bool_]


class Hopeless(Exception):
    """``point``: shares are the most that could have come of it."""

    def __init__(self, point: Point) -> None:
        super().__init__("too many have missed their objectives")
        self.point = point


def end_hopeless(cluster: Cluster, objectives: ServiceObjectives, goal: float | None, requests: int) -> None:
    """Raises Hopeless where more of so many requests have missed an objective for certain than the goal
    allows."""
    if goal is None:
        return
    ttft, tpot, other = missed_by_now(cluster, objectives)
    met = requests - int((ttft | tpot | other).sum())
    if met >= goal * requests:
        return
    shares = [1 - float(each.sum()) / requests for each in (ttft, tpot, other)]
    raise Hopeless(
        Point(
            attainment=met / requests,
            ttft_share=shares[0],
            tpot_share=shares[1],
            other_share=shares[2],
            done_share=met / requests,
            ttft_s=(),
            tpot_s=(),
            end_to_end_s=(),
            tbt_s=(),
            queue_p99_s=None,
            slowdowns=(),
            left_share=0.0,
            mean_w=None,
            pools=(),
        )
    )


def missed_by_now(cluster: Cluster, objectives: ServiceObjectives) -> tuple[Missed, Missed, Missed]:
    """Who has missed TTFT, TPOT and the end-to-end time: the longer a request has been there, the surer. Gaps
    are left out."""
    records, now = cluster.records, cluster.clock.now
    # Copies: records grow on.
    arrival_s, first_s, end_s = (
        np.array(each) for each in (records.arrival_s, records.first_token_s, records.end_s)
    )
    outcome, output = np.array(records.outcome), np.array(records.output_tokens)
    lost: Missed = (outcome != OPEN) & (outcome != DONE)
    first_by_now = np.where(np.isnan(first_s), now, first_s)
    end_by_now = np.where(np.isnan(end_s), now, end_s)
    ttft = first_by_now - arrival_s
    tpot = np.where(
        np.isnan(first_s) | (output < 2), 0.0, (end_by_now - first_by_now) / np.maximum(1, output - 1)
    )
    return (
        _over(ttft, objectives.ttft_s) | lost,
        _over(tpot, objectives.tpot_s) | lost,
        _over(end_by_now - arrival_s, objectives.end_to_end_s) | lost,
    )


def _over(values_s: NDArray[np.float64], bound_s: float | None) -> Missed:
    if bound_s is None:
        return np.zeros(len(values_s), dtype=bool)
    return np.asarray(values_s > bound_s)
