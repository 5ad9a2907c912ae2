"""How a model is cut into the stages of a pipeline, and what of their memory is left for KV."""

from collections.abc import Iterator

from common.cost import kv_token_bytes
from common.shapes import ModelShape


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """As even as they can be, the first ones having more."""
    each, more = divmod(layers, stages)
    return tuple(each + (place < more) for place in range(stages))


def stage_shares(layers: int, stages: int) -> tuple[float, ...]:
    """Of the layers."""
    return tuple(some / layers for some in stage_layers(layers, stages))


def stage_weight_bytes(shape: ModelShape, element_bytes: int, stages: int) -> Iterator[float]:
    """Of each stage: the first one looks tokens up, the last one has the output matrix. Where these are one
    matrix both have it."""
    blocks = shape.multiplied_parameters - shape.head_parameters
    is_shared = shape.lookup_parameters < shape.head_parameters
    for place, layers in enumerate(stage_layers(shape.layers, stages)):
        parameters = blocks * layers / shape.layers
        if place == 0:
            parameters += shape.lookup_parameters
        if place == stages - 1 or (place == 0 and is_shared):
            parameters += shape.head_parameters
        yield parameters * element_bytes


def stage_token_bytes(shape: ModelShape, element_bytes: int, stages: int) -> Iterator[float]:
    """KV of one token in each stage."""
    for share in stage_shares(shape.layers, stages):
        yield kv_token_bytes(shape, element_bytes) * share
