"""A decode step in two: all but attention, and the attention operator (Lamina), for instances whose KV lies
on attention workers.

Not every source knows what attention takes of a step. One that measured whole steps does not.
"""

from typing import Protocol

from common.devices import DeviceSpec
from common.errors import ConfigError
from common.shapes import ModelShape
from services.simulator.performance.linear import LinearPerformance
from services.simulator.performance.operators import OperatorModel
from services.simulator.performance.profiled import LawModel, TableModel, WithOverhead
from services.simulator.performance.roofline import Parallelism, RooflineModel
from services.simulator.performance.sources import (
    AiconfiguratorSource,
    LinearSource,
    OperatorsSource,
    PerformanceSource,
    ProfileSource,
    RooflineSource,
    VidurSource,
    open_source,
)

SPLIT_SOURCES = (
    LinearSource,
    RooflineSource,
    VidurSource,
    OperatorsSource,
    AiconfiguratorSource,
    ProfileSource,
)
SPLIT_MODELS = (LinearPerformance, RooflineModel, OperatorModel, LawModel, TableModel, WithOverhead)


class SplitModel(Protocol):
    """Seconds of one decode step, all layers. What a whole step takes alone is the sum (of a profile's table,
    about that: attention is its law's)."""

    def model_s(self, sequences: int) -> float:
        """Everything but attention."""

    def attention_s(self, sequences: int, context_tokens: int) -> float:
        """``context_tokens``: of all of them."""


def open_split(
    source: PerformanceSource, shape: ModelShape, device: DeviceSpec | None, parallelism: Parallelism
) -> SplitModel:
    """Raises ConfigError for a source that does not tell the two apart, and as ``open_source``."""
    if not isinstance(source, SPLIT_SOURCES):
        kind = type(source).__struct_config__.tag
        rule = (
            "does not tell attention from the rest of a step: with attention workers it must be roofline,"
            " linear, vidur, operators, aiconfigurator or profile"
        )
        raise ConfigError("kind", kind, rule)
    model = open_source(source, shape, device, parallelism).model
    assert isinstance(model, SPLIT_MODELS)
    return model
