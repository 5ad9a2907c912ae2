"""What a decode instance over attention workers tells of its own steps: those of a lane where all lanes are
alike."""

from services.simulator.attention_config import RemoteAttention
from services.simulator.attention_cost import PoolRows, Rows
from services.simulator.attention_rates import Batch, demands_of, layer_rates
from services.simulator.shape import PassShape
from services.simulator.step_times import StepTimes


class LanePerformance:
    """A ``PerformanceModel`` of steps alone, of sequences that lie evenly in ``pools``. Chunks are computed
    elsewhere: they take no time."""

    stages = 1

    def __init__(self, remote: RemoteAttention, pools: int) -> None:
        self._cost, self._turns, self._lanes = remote.cost, remote.turns, remote.needs.lanes
        members = remote.needs.pool_workers
        self._workers = {
            pool: tuple(f"{pool}-{number}" for number in range(members)) for pool in range(pools)
        }

    def pass_s(self, shape: PassShape) -> float:
        return self._step_s(shape.sequences, shape.context_tokens) if shape.sequences else 0.0

    def steps_s(self, sequences: int, context_tokens: int, steps: int) -> float:
        def step_s(step: int) -> float:
            return self._step_s(sequences, context_tokens + step * sequences)

        return StepTimes(step_s, steps).until(steps)

    def _step_s(self, sequences: int, context_tokens: int) -> float:
        cost = self._cost.layer(self._rows(sequences, context_tokens), self._workers)
        batches = [Batch(cost, self._turns, "instance")] * self._lanes
        return self._cost.layers / layer_rates(demands_of(batches))[0]

    def _rows(self, sequences: int, context_tokens: int) -> Rows:
        pools = min(sequences, len(self._workers))
        shares = [(sequences + place) // pools for place in range(pools)]
        return tuple(
            PoolRows(pool, share, round(context_tokens * share / sequences))
            for pool, share in enumerate(shares)
        )
