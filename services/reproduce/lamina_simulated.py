"""Lamina's deployments and vLLM's under more than they can serve: decoding alone, with every place in memory
taken at all times.

Requests come half as fast again as the formulas say they are served. Whoever finds as many there as memory
holds, and some that wait, goes away, so that a queue stands and does not grow. What is drawn is counted from
the middle of the arrivals to the last of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import msgspec
import numpy as np

from common.cost import Throughput
from common.devices import H20, H100
from common.shapes import ModelShape
from services.bench.lengths import LengthPair
from services.reproduce.running import NOBODY_IS_TURNED_AWAY, poisson, scaled
from services.simulator.config import Simulated, simulated_from_tree
from services.simulator.records import Records
from services.simulator.run import Load, simulate

OVERLOAD = 1.5
"""Times what the formulas say is served."""
WAITING_SHARE, FEWEST_WAITING = 0.3, 8
"""Of those who fit by the formulas: so many more are taken in."""
SOJOURNS = 5.0
"""A run lasts so many times as long as a sequence stays."""
FEWEST = 300
"""Requests."""
NIC_BYTES_S = 45.7e9
ONE_WAY_S = 16.5e-6
"""Of an adapter, and half of what a message takes there and back (section 6.3)."""
EXCHANGE_BYTES = 1 << 34
"""Room for any batch: no memory of what is exchanged is counted."""


BLOCK_TOKENS = 16
NO_TIME = {"kind": "linear", "prefill_s": 1e-9}


@dataclass(frozen=True, slots=True)
class Saturated:
    """``batch``: sequences in a step, of both batches where there are two, on average."""

    batch: float
    tokens_s: float

    @property
    def step_s(self) -> float:
        """From token to token."""
        return self.batch / self.tokens_s


@dataclass(frozen=True, slots=True)
class Saturation:
    """What is offered. ``guess``: what the formulas say of it. ``size``: times the usual number of
    requests."""

    pairs: tuple[LengthPair, ...]
    guess: Throughput
    size: float = 1.0

    @property
    def held(self) -> int:
        """Requests that are taken in: those that fit by the formulas, and some that wait."""
        return self.guess.batch + max(FEWEST_WAITING, round(WAITING_SHARE * self.guess.batch))

    @property
    def offered_per_s(self) -> float:
        output_tokens = sum(each.output_tokens for each in self.pairs)
        return OVERLOAD * self.guess.tokens_s * len(self.pairs) / output_tokens

    @property
    def chosen(self) -> tuple[LengthPair, ...]:
        """As many as come within some stays; the pairs again where there are too few."""
        count = max(FEWEST, math.ceil(SOJOURNS * OVERLOAD * self.guess.batch))
        return tuple(islice(cycle(self.pairs), scaled(count, self.size)))


def saturate_vllm(shape: ModelShape, devices: int, load: Saturation) -> Saturated:
    decode = {"name": "decode", "device": H100.name, "devices": devices}
    return _saturate(shape, load, decode)


def saturate_lamina(
    shape: ModelShape, dop: tuple[int, int], load: Saturation, *, is_staggered: bool = True
) -> Saturated:
    """Of ``dop`` = (a, b), with KV by heads and two batches that take turns, as Lamina has them, or one."""
    a, b = dop
    turns = {"pipeline": "rotational", "staggered_batches": 2} if is_staggered else {"pipeline": "off"}
    decode = {
        "name": "decode",
        "device": H100.name,
        "devices": a,
        "link_bytes_per_s": a * NIC_BYTES_S,
        "instance": {"attention_workers": b, "attention_partition": "heads", **turns},
    }
    workers = {
        "name": "attention",
        "role": "attention",
        "count": b,
        "device": H20.name,
        "link_bytes_per_s": NIC_BYTES_S,
        "link_latency_s": ONE_WAY_S,
        "performance": {"kind": "roofline"},
    }
    return _saturate(shape, load, decode, workers)


def _saturate(shape: ModelShape, load: Saturation, *pools: dict[str, Any]) -> Saturated:
    requests = poisson(load.chosen, load.offered_per_s)
    simulated = with_kv_at_once(simulated_from_tree(tree_of(shape, load, pools)))
    cluster = simulate(simulated, Load(requests))
    end_s = requests[-1].arrival_s
    return drawn_between(cluster.records, end_s / 2, end_s)


def with_kv_at_once(simulated: Simulated) -> Simulated:
    """Prompts' KV has links of its own: the paper leaves prefill out. What steps exchange keeps its links."""
    attention = simulated.attention
    return msgspec.structs.replace(
        simulated,
        pools=tuple(
            each._replace(config=msgspec.structs.replace(each.config, link_bytes_per_s=None))
            for each in simulated.pools
        ),
        attention=attention and attention._replace(link_bytes_per_s=simulated.cluster.link_bytes_per_s),
    )


def tree_of(shape: ModelShape, load: Saturation, pools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Decoding alone is looked at: a prompt takes no time, nor does its KV."""
    longest = sorted((each.prompt_tokens for each in load.pairs), reverse=True)[: load.held]
    prompts = {
        "name": "prompts",
        "role": "prefill",
        "kv_tokens": sum(longest) + load.held * 2 * BLOCK_TOKENS,
        "performance": NO_TIME,
    }
    common = {"role": "decode", "count": 1, "performance": {"kind": "roofline"}}
    return {
        "cluster": {"model": shape.name, "hop_s": 0.0, "link_bytes_per_s": 1e13},
        "transfer": {"layerwise_min_tokens": 10_000_000, "pull_share": 1.0},
        "attention": {"exchange_bytes": EXCHANGE_BYTES},
        "instance": {
            "block_size": BLOCK_TOKENS,
            "chunk_tokens": longest[0],
            "max_decode_batch": load.held,
            "max_waiting_requests": 1_000_000,
        },
        "scheduler": {**NOBODY_IS_TURNED_AWAY, "max_requests_per_decode": load.held},
        "pool": [{**common, **each} for each in (prompts, *pools)],
    }


def drawn_between(records: Records, start_s: float, end_s: float) -> Saturated:
    """A request's tokens after its second one are spread evenly to its end, and it is in a step as long
    before each. Raises ValueError where nobody drew three."""
    columns = records.columns()
    second, end, drawn = (columns[name] for name in ("second_token_s", "end_s", "drawn_tokens"))
    some = np.isfinite(second) & (drawn > 1)
    second, end, drawn = second[some], end[some], drawn[some]
    long = drawn > 2
    if not long.any():
        raise ValueError("nobody drew three tokens")
    gap_s = np.where(long, (end - second) / np.maximum(1, drawn - 2), 0.0)
    gap_s[~long] = np.average(gap_s[long], weights=drawn[long] - 2)
    begun = second - gap_s
    present = np.clip(np.minimum(end, end_s) - np.maximum(begun, start_s), 0.0, None)
    seconds = end_s - start_s
    return Saturated(float(present.sum()) / seconds, float((present / gap_s).sum()) / seconds)
