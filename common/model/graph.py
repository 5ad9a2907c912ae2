"""Words for reading and changing a captured graph (torch.fx over aten calls)."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

OPEN_END = 2**63 - 1
"""How aten writes "to the end" in a slice."""


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Sizes; a SymInt where the batch's tokens count."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def is_call(node: object, target: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target == target


def dependents_only_on(graph: fx.Graph, roots: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes computed from ``roots`` (included) and nothing else."""
    found = set(roots)
    for node in graph.nodes:
        if node.op == "call_function" and all(parent in found for parent in node.all_input_nodes):
            found.add(node)
    return found


def has_equal_shape(left: fx.Node, right: fx.Node) -> bool:
    a, b = shape_of(left), shape_of(right)
    return len(a) == len(b) and all(str(x) == str(y) for x, y in zip(a, b, strict=True))


def insert_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], shape_rule: Callable[..., Any]
) -> fx.Node:
    """A call whose shape and dtype are computed on the inputs' fake tensors."""
    node = graph.call_function(target, args)
    fakes = fx.node.map_arg(args, lambda argument: argument.meta["val"])
    mode = next(argument.meta["val"].fake_mode for argument in node.all_input_nodes)
    with mode, torch.no_grad():
        node.meta["val"] = shape_rule(*fakes)
    return node
