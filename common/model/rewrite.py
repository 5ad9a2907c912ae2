"""Rewrites of a captured graph that keep its meaning and make it cheaper, and cuttable.

Each rewrite is a pattern over a few nodes: drop what does nothing, turn Conv1D into linear, split packed
projections (so that Q can leave before K and V exist), fuse RMSNorm, and turn rotary embedding into products
with tables that depend on the step's positions alone. All work in place on the fx graph.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

aten = torch.ops.aten

OPEN_END = 2**63 - 1
"""How aten writes "to the end" in a slice."""


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
    graph.eliminate_dead_code()
    graph.lint()


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
    if target in {aten.slice.Tensor, aten.view.default, aten.expand.default} and _equal_shapes(source, node):
        return source
    return None


def _only_full_part(cat: fx.Node) -> fx.Node | None:
    """A concatenation with empty tensors loses them; None unless one part is left."""
    args: Any = cat.args
    full = [part for part in args[0] if all(size != 0 for size in shape_of(part))]
    if len(full) < len(args[0]):
        cat.args = (full, *args[1:])
    return full[0] if len(full) == 1 else None


def _equal_shapes(left: fx.Node, right: fx.Node) -> bool:
    a, b = shape_of(left), shape_of(right)
    return len(a) == len(b) and all(str(x) == str(y) for x, y in zip(a, b, strict=True))


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


# -- norms and rotations ------------------------------------------------------------------------------------


def fuse_rms_norms(graph: fx.Graph, weight_nodes: set[fx.Node]) -> None:
    """``x · rsqrt(mean(x²) + eps) · w`` becomes one call where x and w have one dtype at that point."""
    for node in list(graph.nodes):
        found = _match_rms_norm(node)
        if found is None:
            continue
        scaled, source, eps = found
        end, outer = scaled, next(iter(scaled.users), None)
        if len(scaled.users) == 1 and outer is not None and is_call(outer, aten._to_copy.default):
            end, outer = outer, next(iter(outer.users), None)
        if outer is None or len(end.users) != 1 or not is_call(outer, aten.mul.Tensor):
            continue
        weights = [argument for argument in outer.args if argument in weight_nodes]
        if len(weights) != 1:
            continue
        weight: Any = weights[0]
        upcast: Any = source
        if end is not scaled and is_call(source, aten._to_copy.default):
            upcast = source.args[0]
        if not dtype_of(upcast) == dtype_of(weight) == dtype_of(outer):
            continue
        width = int(shape_of(weight)[-1])
        with graph.inserting_before(outer):
            fused = insert_call(graph, F.rms_norm, (upcast, (width,), weight, eps), lambda x, *_: x * 1)
        outer.replace_all_uses_with(fused)
    graph.eliminate_dead_code()


def _match_rms_norm(rsqrt: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """From the rsqrt: (x · rsqrt(…), x, eps)."""
    if not is_call(rsqrt, aten.rsqrt.default) or len(rsqrt.users) != 1:
        return None
    add: Any = rsqrt.args[0]
    mean: Any = add.args[0] if is_call(add, aten.add.Tensor) else None
    if not (is_call(mean, aten.mean.dim) and list(mean.args[1]) in ([-1], [len(shape_of(mean)) - 1])):
        return None
    power: Any = mean.args[0]
    if not (is_call(power, aten.pow.Tensor_Scalar) and power.args[1] == 2):
        return None
    scaled = next(iter(rsqrt.users))
    source: Any = power.args[0]
    if not is_call(scaled, aten.mul.Tensor) or source not in scaled.args:
        return None
    return scaled, source, float(add.args[1])


def fold_rotations(graph: fx.Graph, position_nodes: set[fx.Node]) -> None:
    """``cat(−x₂, x₁) · s`` becomes ``cat(x₂, x₁) · (−s₁, s₂)`` where s depends on positions alone.

    The signed table is then computed once a step, not once a layer.
    """
    for node in list(graph.nodes):
        if not is_call(node, aten.mul.Tensor):
            continue
        for rotated, table in (node.args, node.args[::-1]):
            halves = _match_rotated(rotated)
            if halves is None or table not in position_nodes:
                continue
            second, first, half = halves
            signed = _insert_signed(graph, table, half)
            with graph.inserting_before(node):
                swapped = insert_call(graph, aten.cat.default, ([second, first], -1), torch.cat)
            node.args = (swapped, signed)
            break
    graph.eliminate_dead_code()


def _match_rotated(node: object) -> tuple[fx.Node, fx.Node, int] | None:
    """``cat([neg(x[half:]), x[:half]], −1)`` → (x[half:], x[:half], half)."""
    if not is_call(node, aten.cat.default):
        return None
    args: Any = node.args  # type: ignore[attr-defined]
    if len(args) != 2 or args[1] != -1 or len(args[0]) != 2 or not is_call(args[0][0], aten.neg.default):
        return None
    second, first = args[0][0].args[0], args[0][1]
    if shape_of(second)[-1] != shape_of(first)[-1]:
        return None
    return second, first, int(shape_of(first)[-1])


def _insert_signed(graph: fx.Graph, table: fx.Node, half: int) -> fx.Node:
    with graph.inserting_after(table):
        first = insert_call(graph, aten.slice.Tensor, (table, -1, 0, half), lambda t, *_: t[..., :half])
    with graph.inserting_after(first):
        second = insert_call(
            graph, aten.slice.Tensor, (table, -1, half, OPEN_END), lambda t, *_: t[..., half:]
        )
    with graph.inserting_after(second):
        negated = insert_call(graph, aten.neg.default, (first,), torch.neg)
    with graph.inserting_after(negated):
        return insert_call(graph, aten.cat.default, ([negated, second], -1), torch.cat)


def share_equal_nodes(graph: fx.Graph) -> None:
    """One node for equal calls on equal inputs: per-layer views of the step's tables, repeated casts."""
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target == torch.ops.lamella.attention.default:
            continue
        key = f"{node.target}{node.args}{sorted(node.kwargs.items())}"
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node


def fuse_multiply_add(graph: fx.Graph) -> None:
    """``a·b + c·d`` becomes ``addcmul(a·b, c, d)``; only where shapes say no broadcasting of the sum."""
    for node in list(graph.nodes):
        if not is_call(node, aten.add.Tensor) or len(node.args) != 2 or node.kwargs:
            continue
        args: Any = node.args
        left, product = args
        if not (is_call(left, aten.mul.Tensor) and is_call(product, aten.mul.Tensor)):
            continue
        factors = product.args
        if len(product.users) != 1 or not all(isinstance(factor, fx.Node) for factor in factors):
            continue
        if not _equal_shapes(left, node) or len({dtype_of(n) for n in (left, *factors)}) > 1:
            continue
        with graph.inserting_before(node):
            fused = insert_call(graph, torch.addcmul, (left, *factors), lambda a, b, c: a + b * c)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
    graph.eliminate_dead_code()


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
