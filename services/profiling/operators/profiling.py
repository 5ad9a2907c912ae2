"""All operators of a model on this machine, and the files that the simulator's estimator reads of them.

One directory holds every degree of tensor parallelism: a shard of any is computed on one device, as it would
be on each of several. Columns are those of Vidur's profiler, and our own beside them
(``services.simulator.performance.vidur_files``).
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from common.config import ModelConfig
from common.errors import ConfigError
from common.model.device import accelerator_name, device_of
from common.model.precision import precision_of
from common.model.program import TORCH_DTYPES
from common.profile import machine_name
from common.shapes import ModelShape
from services.profiling.operators.communication import check_participants, measure_messages
from services.profiling.operators.laps import Laps, laps_on
from services.profiling.operators.measuring import Row, measure_shard
from services.profiling.operators.message_worker import Collective, Messages
from services.profiling.operators.sizes import Effort, Limits, Shard, message_sizes, shard_of
from services.profiling.operators.token_layers import Weights
from services.simulator.performance.vidur_files import DTYPE, TENSOR_PARALLEL

STAGES = 2
"""Between which a message is sent."""
MESSAGE_TABLES: tuple[Collective, ...] = get_args(Collective)
Stage = Callable[[str, float], None]
"""What is being measured, and the share of it that is done."""


@dataclass(frozen=True, slots=True)
class OperatorsRequest:
    """``model``: its dtype, device, threads, form of weights. ``effort.limit_s``: of everything."""

    shape: ModelShape
    tensor_parallel: tuple[int, ...]
    model: ModelConfig
    block_size: int
    limits: Limits
    effort: Effort
    has_messages: bool


def profile_operators(
    request: OperatorsRequest, directory: Path, stage: Stage, laps: Laps | None = None
) -> list[Path]:
    """The files written. ``laps``: another clock than the device's. Raises ConfigError before anything is
    measured, CommunicationError."""
    device = device_of("--device", request.model.device)
    shards = [shard_of(request.shape, degree) for degree in request.tensor_parallel]
    participants = _participants(request, device)
    check_participants(device, participants)
    directory.mkdir(parents=True, exist_ok=True)
    if request.model.threads is not None:
        torch.set_num_threads(request.model.threads)
    precision = precision_of(request.model)
    dtype = TORCH_DTYPES[precision.compute]
    own: Row = {DTYPE: precision.compute, "device": machine_name(accelerator_name(request.model.device))}
    effort = Effort(request.effort.rounds, request.effort.limit_s / (len(shards) + bool(participants)))
    tables: dict[str, list[Row]] = defaultdict(list)
    for shard in shards:
        progress = partial(stage, f"a shard of {shard.tensor_parallel}")
        weights = Weights(dtype, device, precision.weights)
        sizes = _sizes(shard, request)
        how = effort, progress, laps or laps_on(device)
        found = measure_shard(shard, weights, request.block_size, request.limits, *how)
        for name, rows in found.items():
            tables[name] += [{**row, **sizes[name], TENSOR_PARALLEL: shard.tensor_parallel} for row in rows]
    messages = _messages(request, participants, dtype.itemsize)
    tables.update(measure_messages(messages, dtype, device, effort, partial(stage, "messages")))
    for name in MESSAGE_TABLES:
        if name not in tables:  # another profile's, of more
            (directory / f"{name}.csv").unlink(missing_ok=True)
    return [
        write_rows(directory / f"{name}.csv", [{**row, **own} for row in rows])
        for name, rows in tables.items()
    ]


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    """Columns of any row; those that a row has not are empty in it."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def parse_degrees(text: str) -> tuple[int, ...]:
    """Of "1,2,4". Raises ConfigError."""
    try:
        degrees = tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        raise ConfigError("--tp", text, "must be numbers with commas, such as 1,2,4") from None
    return degrees


def _participants(request: OperatorsRequest, device: torch.device) -> tuple[int, ...]:
    """Between how many messages are measured: the shards of a degree, and two stages of a pipeline where
    there are two devices."""
    if not request.has_messages:
        return ()
    groups = {degree for degree in request.tensor_parallel if degree > 1}
    if device.type != "cuda" or torch.cuda.device_count() >= STAGES:
        groups.add(STAGES)
    return tuple(sorted(groups))


def _messages(request: OperatorsRequest, participants: Iterable[int], element_bytes: int) -> list[Messages]:
    """Reductions and sends of a pass's hidden states; what the shards gather are their parts of logits."""
    shape, limits = request.shape, request.limits
    states = message_sizes(limits.tokens * shape.hidden_size * element_bytes)
    found = [Messages("send_recv", STAGES, states)] if STAGES in participants else []
    for degree in request.tensor_parallel:
        if degree > 1 and degree in participants:
            part = shard_of(shape, degree).vocab_size * element_bytes
            found.append(Messages("all_reduce", degree, states))
            found.append(Messages("all_gather", degree, message_sizes(limits.batch * part)))
    return found


def _sizes(shard: Shard, request: OperatorsRequest) -> Mapping[str, Row]:
    """Of the whole model: a shard's follow from its degree."""
    shape = shard.shape
    widths: Row = {"n_embd": shape.hidden_size, "n_kv_head": shape.kv_heads}
    return {
        "mlp": {
            **widths,
            "n_head": shape.heads,
            "n_expanded_embd": shape.intermediate_size,
            "vocab_size": shape.vocab_size,
            "use_gated_mlp": shard.is_gated,
        },
        "attention": {
            **widths,
            "n_q_head": shape.heads,
            "block_size": request.block_size,
            "max_model_len": request.limits.context,
            "attention_backend": "lamella",
        },
        "sequences": {"n_embd": shape.hidden_size, "vocab_size": shape.vocab_size},
    }
