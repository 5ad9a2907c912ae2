"""Rewrites of a captured graph that keep its meaning and make it cheaper, and cuttable.

Each rewrite is a pattern over a few nodes: drop what does nothing, turn Conv1D into linear, split packed
projections (so that Q can leave before K and V exist), fuse RMSNorm, and turn rotary embedding into products
with tables that depend on the step's positions alone. All work in place on the fx graph.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from common.model.fusions import (
    fold_rotations,
    fuse_gated_activations,
    fuse_multiply_add,
    fuse_rms_norms,
    fuse_rotations,
    fuse_sums_with_norms,
    share_equal_nodes,
)
from common.model.graph import (
    aten,
    dependents_only_on,
    dtype_of,
    has_equal_shape,
    insert_call,
    is_call,
    shape_of,
)


def rewrite(graph: fx.Graph, weights: Collection[fx.Node], positions: fx.Node) -> None:
    """``weights`` are the placeholders known at load, ``positions`` the step's. Shapes stay in ``meta``."""
    drop_no_operations(graph)
    linearize_addmm(graph)
    drop_no_operations(graph)
    split_packed_linears(graph, dependents_only_on(graph, weights))
    fuse_rms_norms(graph, dependents_only_on(graph, weights))
    fold_rotations(graph, dependents_only_on(graph, {*weights, positions}))
    share_equal_nodes(graph)
    fuse_multiply_add(graph)
    fuse_rotations(graph)
    fuse_gated_activations(graph)
    fuse_sums_with_norms(graph)
    graph.eliminate_dead_code()
    graph.lint()


# -- what does nothing --------------------------------------------------------------------------------------


def drop_no_operations(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target == aten._assert_tensor_metadata.default:
            graph.erase_node(node)
            continue
        same = _equal_input(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _equal_input(node: fx.Node) -> fx.Node | None:
    """The input that the node merely repeats. The graph is functional, so a copy is as good as its source."""
    args: Any = node.args
    target = node.target
    if target == aten.cat.default:
        return _only_full_part(node)
    if not (args and isinstance(args[0], fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)):
        return None
    source: fx.Node = args[0]
    if not isinstance(source.meta.get("val"), torch.Tensor) or dtype_of(source) != dtype_of(node):
        return None
    if target in {aten.alias.default, aten.clone.default, aten._to_copy.default, aten.type_as.default}:
        return source if "memory_format" not in node.kwargs or target != aten.clone.default else None
    if target == aten.mul.Tensor and args[1] == 1.0 and not isinstance(args[1], fx.Node):
        return source
    if target in {aten.slice.Tensor, aten.view.default, aten.expand.default} and has_equal_shape(
        source, node
    ):
        return source
    return None


def _only_full_part(cat: fx.Node) -> fx.Node | None:
    """A concatenation with empty tensors loses them; None unless one part is left."""
    args: Any = cat.args
    full = [part for part in args[0] if all(size != 0 for size in shape_of(part))]
    if len(full) < len(args[0]):
        cat.args = (full, *args[1:])
    return full[0] if len(full) == 1 else None


# -- linears ------------------------------------------------------------------------------------------------


def linearize_addmm(graph: fx.Graph) -> None:
    """``view(addmm(bias, view(x), W))`` of Conv1D becomes ``linear(x, Wᵀ, bias)``."""
    for node in list(graph.nodes):
        if not is_call(node, aten.addmm.default):
            continue
        args: Any = node.args
        bias, rows, weight = args
        with graph.inserting_after(weight):
            transposed = insert_call(graph, aten.t.default, (weight,), lambda w: w.t())
        with graph.inserting_before(node):
            linear = insert_call(graph, aten.linear.default, (rows, transposed, bias), F.linear)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)
        _drop_flattening(graph, linear, rows)


def _drop_flattening(graph: fx.Graph, linear: fx.Node, rows: fx.Node) -> None:
    """Takes [1, T, in] → [T, in] → linear → [1, T, out] as the linear alone."""
    args: Any = linear.args
    if not is_call(rows, aten.view.default):
        return
    source: Any = rows.args[0]
    users = list(linear.users)
    if not all(
        is_call(user, aten.view.default) and str(shape_of(user)[:-1]) == str(shape_of(source)[:-1])
        for user in users
    ):
        return
    with graph.inserting_before(linear):
        whole = insert_call(graph, aten.linear.default, (source, *args[1:]), F.linear)
    for user in users:
        user.replace_all_uses_with(whole)
        graph.erase_node(user)
    graph.erase_node(linear)


def split_packed_linears(graph: fx.Graph, weight_nodes: set[fx.Node]) -> None:
    """A linear of which only slices are used becomes one linear a slice, over rows of the weight."""
    for node in list(graph.nodes):
        if not (is_call(node, aten.linear.default) and node.args[1] in weight_nodes):
            continue
        parts = list(_column_parts(node))
        if not parts:
            continue
        args: Any = node.args
        for user, start, stop in parts:
            rows = [_insert_rows(graph, weight, start, stop) for weight in args[1:] if weight is not None]
            with graph.inserting_before(user):
                part = insert_call(graph, aten.linear.default, (args[0], *rows), F.linear)
            user.replace_all_uses_with(part)
        for user, _, _ in parts:
            graph.erase_node(user)
        graph.eliminate_dead_code()


def _column_parts(linear: fx.Node) -> Iterator[tuple[fx.Node, int, int]]:
    """(user, start, stop) when every user is a slice, or an item of a split, of the last dimension."""
    last = len(shape_of(linear)) - 1
    parts: list[tuple[fx.Node, int, int]] = []
    for user in linear.users:
        args: Any = user.args
        if is_call(user, aten.slice.Tensor) and args[1] in (last, -1) and len(args) == 4:
            start = args[2] or 0
            parts.append((user, start, start + int(shape_of(user)[-1])))
        elif is_call(user, aten.split.Tensor) and len(args) == 3 and args[2] in (last, -1):
            parts += _items(user, [args[1]] * len(user.meta["val"]))
        elif is_call(user, aten.split_with_sizes.default) and len(args) == 3 and args[2] in (last, -1):
            parts += _items(user, args[1])
        else:
            return
    yield from parts


def _items(split: fx.Node, sizes: list[int]) -> Iterator[tuple[fx.Node, int, int]]:
    """(item, start, stop) of each part of a split that is used."""
    for item in split.users:
        index: Any = item.args[1]
        start = sum(sizes[:index])
        yield item, start, start + sizes[index]


def _insert_rows(graph: fx.Graph, weight: fx.Node, start: int, stop: int) -> fx.Node:
    """Right after the weight, so that whatever needs it finds it defined."""
    with graph.inserting_after(weight):
        return insert_call(graph, aten.slice.Tensor, (weight, 0, start, stop), lambda w, _, a, b: w[a:b])
