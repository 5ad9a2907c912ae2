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


def token_dims(node: fx.Node) -> list[int]:
    """The dimensions whose size depends on the number of tokens."""
    return [dim for dim, size in enumerate(shape_of(node)) if isinstance(size, torch.SymInt)]


def token_bytes(node: fx.Node) -> int | None:
    """Bytes that one token adds to a value; all of them, for a value without a row per token.

    None for what cannot be kept from slice to slice: several tensors, or rows that are not the batch's.
    """
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return None
    dims = token_dims(node)
    if len(dims) > 1 or any(not shape_of(node)[dim].node.expr.is_Symbol for dim in dims):
        return None
    width = 1
    for dim, size in enumerate(value.shape):
        width *= 1 if dim in dims else int(size)
    return width * int(value.dtype.itemsize)


def operator_name(node: fx.Node) -> str:
    """The operator without its library: ``linear``, ``rms_norm``, ``add``."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet))


def module_of(node: fx.Node) -> str:
    """Where in the model's code a node comes from, such as ``model.layers.3.mlp``; if inserted, its input."""
    waiting: list[fx.Node] = [node]
    seen: set[fx.Node] = set()
    while waiting:
        current = waiting.pop(0)
        stack = current.meta.get("nn_module_stack")
        path = str(list(stack.values())[-1][0]) if stack else ""
        if path.startswith("model."):
            return path.removeprefix("model.")
        fresh = [parent for parent in current.all_input_nodes if parent not in seen]
        seen.update(fresh)
        waiting += fresh
    return ""


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
