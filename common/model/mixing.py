"""Which operator of a captured graph makes a token depend on the tokens beside it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from common.model.capture import CapturedModel, attention_operator
from common.model.graph import dependents_only_on, token_dims


class _Run:
    """A captured graph run on real values, node by node, with attention that lets a token see only itself."""

    def __init__(self, model: CapturedModel, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        self.values: dict[fx.Node, Any] = {model.token_ids: token_ids, model.positions: positions}

    def compute(self, node: fx.Node, weights: dict[fx.Node, Any]) -> Any:
        target: Any = _own_token if node.target is attention_operator() else node.target
        args: Any = fx.node.map_arg(node.args, lambda each: self._value(each, weights))
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda each: self._value(each, weights))
        self.values[node] = target(*args, **kwargs)
        return self.values[node]

    def _value(self, node: fx.Node, weights: dict[fx.Node, Any]) -> Any:
        return weights[node] if node in weights else self.values[node]


def _own_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    """[1, heads, T, head_dim] of each → [1, T, heads, head_dim], a token's from its own Q, K and V."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (part.repeat_interleave(group, dim=1) for part in (k, v))
    return ((q * wide_k).sigmoid() + wide_v).transpose(1, 2).contiguous()


@torch.inference_mode()
def mixing_operator(
    model: CapturedModel,
    weight: Callable[[str], torch.Tensor],
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    tolerance: float,
) -> fx.Node | None:
    """The first operator whose result for the last token differs when that token is run alone.

    ``token_ids`` and ``positions`` are [1, T]; differences count relative to the result's largest value.
    """
    together, alone = _Run(model, token_ids, positions), _Run(model, token_ids[:, -1:], positions[:, -1:])
    placeholders = {*model.parameters, *model.constants}
    known = dependents_only_on(model.graph, placeholders)
    weights: dict[fx.Node, Any] = dict(model.constants)
    remaining = {node: len(node.users) for node in model.graph.nodes}
    for node in model.graph.nodes:
        if node in model.parameters:
            weights[node] = weight(model.parameters[node])
        elif node.op == "call_function" and node in known:
            weights[node] = together.compute(node, weights)
        elif node.op == "call_function":
            left, right = together.compute(node, weights), alone.compute(node, weights)
            if isinstance(left, torch.Tensor) and _differ(node, left, right, tolerance):
                found: fx.Node = node
                return found
        for parent in node.all_input_nodes:
            remaining[parent] -= 1
            if remaining[parent] == 0:
                for values in (weights, together.values, alone.values):
                    values.pop(parent, None)
    return None


def _differ(node: fx.Node, together: torch.Tensor, alone: torch.Tensor, tolerance: float) -> bool:
    """Of the last token, where a value has one row per token; entirely, where it has none."""
    dims = token_dims(node)
    if len(dims) > 1:
        return True
    if dims and together.shape[dims[0]] != 1:
        rows = alone.shape[dims[0]]
        together = together.narrow(dims[0], together.shape[dims[0]] - rows, rows)
    scale = float(together.abs().max()) if together.numel() else 0.0
    difference = float((together.double() - alone.double()).abs().max()) if together.numel() else 0.0
    return difference > tolerance * max(scale, 1e-6)
