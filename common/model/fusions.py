"""Fusions of a captured graph: RMSNorm, rotary embedding, gated activations, multiply-add, shared nodes."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from common.model import kernels
from common.model.graph import OPEN_END, aten, dtype_of, has_equal_shape, insert_call, is_call, shape_of


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
        if not has_equal_shape(left, node) or len({dtype_of(n) for n in (left, *factors)}) > 1:
            continue
        with graph.inserting_before(node):
            fused = insert_call(graph, torch.addcmul, (left, *factors), lambda a, b, c: a + b * c)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def fuse_rotations(graph: fx.Graph) -> None:
    """``addcmul(x · cos, cat(x₂, x₁), sin)``, as ``fold_rotations`` leaves it, becomes one call."""
    for node in list(graph.nodes):
        if node.target is not torch.addcmul:
            continue
        product, swapped, sin = node.args
        x = _swapped_source(swapped)
        if x is None or not is_call(product, aten.mul.Tensor) or x not in product.args:
            continue
        cos: Any = product.args[1] if product.args[0] is x else product.args[0]
        if not (_is_table_of(cos, x) and _is_table_of(sin, x)) or len(product.users) > 1:
            continue
        with graph.inserting_before(node):
            fused = insert_call(graph, kernels.rotate, (x, cos, sin), lambda a, *_: a * 1)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _swapped_source(cat: Any) -> fx.Node | None:
    """``cat([x[half:], x[:half]], −1)`` → x."""
    if not is_call(cat, aten.cat.default) or len(cat.args) != 2 or cat.args[1] != -1:
        return None
    parts = cat.args[0]
    if len(parts) != 2 or not all(is_call(part, aten.slice.Tensor) for part in parts):
        return None
    second, first = parts
    x = first.args[0]
    width = shape_of(x)[-1]
    last = {-1, len(shape_of(x)) - 1}
    is_first = first.args[1] in last and first.args[2] == 0 and first.args[3] == width // 2
    is_second = second.args[0] is x and second.args[1] in last and second.args[2] == width // 2
    return x if is_first and is_second and shape_of(second)[-1] == width // 2 else None


def _is_table_of(table: object, x: fx.Node) -> bool:
    """[1, 1, tokens, width] for x [1, heads, tokens, width]."""
    if not isinstance(table, fx.Node) or dtype_of(table) != dtype_of(x):
        return False
    shape, whole = shape_of(table), shape_of(x)
    return len(whole) == len(shape) == 4 and shape[1] == 1 and whole[0] == 1 and shape[3] == whole[3]


def fuse_gated_activations(graph: fx.Graph) -> None:
    """``silu(gate) · up`` becomes one call."""
    for node in list(graph.nodes):
        if not is_call(node, aten.mul.Tensor):
            continue
        for activated, up in (node.args, node.args[::-1]):
            if not is_call(activated, aten.silu.default) or len(activated.users) > 1:
                continue
            gate: Any = activated.args[0]
            if not isinstance(up, fx.Node) or not has_equal_shape(gate, up) or len(shape_of(gate)) != 3:
                continue
            if dtype_of(gate) != dtype_of(up):
                continue
            with graph.inserting_before(node):
                fused = insert_call(graph, kernels.silu_multiply, (gate, up), lambda a, b: a * b)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            break
    graph.eliminate_dead_code()


def fuse_sums_with_norms(graph: fx.Graph) -> None:
    """The residual sum and the RMSNorm over it become one call with two results."""
    for norm in list(graph.nodes):
        if not is_call(norm, F.rms_norm):
            continue
        total, *rest = norm.args
        if not is_call(total, aten.add.Tensor) or len(total.args) != 2 or total.kwargs:
            continue
        if not all(isinstance(part, fx.Node) and has_equal_shape(part, total) for part in total.args):
            continue
        if len({dtype_of(part) for part in (*total.args, total)}) > 1 or rest[1].op != "placeholder":
            continue
        with graph.inserting_before(total):
            both = insert_call(
                graph, kernels.add_rms_norm, (*total.args, *rest), lambda a, *_: (a * 1, a * 1)
            )
            results = [graph.call_function(operator.getitem, (both, index)) for index in (0, 1)]
        for result, value, replaced in zip(results, both.meta["val"], (total, norm), strict=True):
            result.meta["val"] = value
            _stands_where(result, replaced)
        _stands_where(both, total)
        norm.replace_all_uses_with(results[1])
        graph.erase_node(norm)
        total.replace_all_uses_with(results[0])
    graph.eliminate_dead_code()


def fuse_views(graph: fx.Graph) -> None:
    """Calls that take parts of a merged linear's output are given the output and where the part begins."""
    for node in list(graph.nodes):
        if node.target is kernels.silu_multiply:
            _fuse_halves(graph, node)
        elif node.target is kernels.rotate:
            _fuse_heads(graph, node)
    graph.eliminate_dead_code()


def _fuse_halves(graph: fx.Graph, node: fx.Node) -> None:
    gate, up = (_part_of_last(each) for each in node.args)
    if gate is None or up is None or gate[0] is not up[0]:
        return
    source, width = gate[0], int(shape_of(node)[-1])
    if (gate[1], up[1]) != (0, width) or shape_of(source)[-1] != 2 * width or len(shape_of(source)) != 3:
        return
    with graph.inserting_before(node):
        fused = insert_call(graph, kernels.silu_multiply_halves, (source,), lambda x: x[..., :width] * 1)
    node.replace_all_uses_with(fused)


def _fuse_heads(graph: fx.Graph, node: fx.Node) -> None:
    """``rotate(transpose(view(x[first:…], heads), 1, 2))`` of [1, tokens, …] x."""
    args: Any = node.args
    turned, cos, sin = args
    if not (is_call(turned, aten.transpose.int) and tuple(turned.args[1:]) == (1, 2)):
        return
    view: Any = turned.args[0]
    if not (is_call(view, aten.view.default) and len(shape_of(view)) == 4):
        return
    heads, width = (int(size) for size in shape_of(view)[2:])
    whole: Any = view.args[0]
    part = _part_of_last(whole)
    source, first = part if part is not None else (whole, 0)
    if len(shape_of(source)) != 3 or shape_of(whole)[-1] != heads * width:
        return
    with graph.inserting_before(node):
        rotated = insert_call(
            graph,
            kernels.rotate_heads,
            (source, cos, sin, first, heads),
            lambda x, *_: x.narrow(2, first, heads * width).reshape(1, x.shape[1], heads, width) * 1,
        )
        _stands_where(rotated, view)
        turned_back = insert_call(graph, aten.transpose.int, (rotated, 1, 2), torch.transpose)
    node.replace_all_uses_with(turned_back)


def _part_of_last(node: Any) -> tuple[fx.Node, int] | None:
    """``x[..., first:stop]`` → (x, first)."""
    if not is_call(node, aten.slice.Tensor) or len(node.args) != 4:
        return None
    source, dim, first, _ = node.args
    return (source, int(first)) if dim in (-1, len(shape_of(source)) - 1) and int(first) >= 0 else None


def _stands_where(node: fx.Node, other: fx.Node) -> None:
    """In the model's code, for ``module_of``."""
    node.meta["nn_module_stack"] = other.meta.get("nn_module_stack")
