"""Where a captured graph is cut: between two attentions, with Q first (Lamina's automated converter).

Slice i takes what attention i−1 returned, computes Q of layer i and sends it, computes K and V and sends
them. The last slice computes the logits. What a slice leaves for later ones is its *context*: for the common
families the residual stream and the step's rotary tables. The cut is structural here: a slice computes
exactly the ancestors of its Q, K and V that no earlier slice has computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from common.model.capture import CapturedModel
from common.model.graph import aten, dependents_only_on, insert_call, is_call, shape_of


@dataclass(frozen=True, slots=True)
class Slice:
    """``layer``: whose Q, K, V it sends; None for the last one, which returns ``results`` = (logits,).

    ``received`` is the attention node whose output it takes (None: the first). ``nodes`` are grouped by what
    is sent after them. ``context`` comes in, ``results`` go out (the next slice's context).
    """

    layer: int | None
    received: fx.Node | None
    nodes: tuple[tuple[fx.Node, ...], ...]
    sent: tuple[tuple[fx.Node, ...], ...]
    context: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


def cut(model: CapturedModel) -> tuple[Slice, ...]:
    """One slice more than attentions. Merges linears on the way, never Q's with K's or V's."""
    weights = dependents_only_on(model.graph, {*model.parameters, *model.constants})
    groups = _groups(model, weights)
    for members in groups:
        _merge_linears(model.graph, members)
    weights = dependents_only_on(model.graph, {*model.parameters, *model.constants})
    return _slices(model, _groups(model, weights), weights)


def _groups(model: CapturedModel, weights: set[fx.Node]) -> list[list[fx.Node]]:
    """What is computed before each send, in order: Q₀, KV₀, Q₁, KV₁, …, and the rest.

    Sizes are in no group: every slice reads the number of tokens from its own input.
    """
    sizes = {node for node in model.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)}
    placed = {*weights, *sizes, *model.attentions, model.token_ids, model.positions}
    groups: list[list[fx.Node]] = []
    for attention in model.attentions:
        groups.append(_ancestors(model.graph, attention.args[:1], placed))
        groups.append(_ancestors(model.graph, attention.args[1:3], placed))
    groups.append(_ancestors(model.graph, (model.output,), placed))
    return groups


def _ancestors(graph: fx.Graph, targets: Iterable[Any], placed: set[fx.Node]) -> list[fx.Node]:
    """``targets`` and what they need beyond ``placed``, in the graph's order; they are placed then."""
    needed: set[fx.Node] = set()
    waiting = [node for node in targets if node not in placed]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [parent for parent in node.all_input_nodes if parent not in placed]
    placed |= needed
    return [node for node in graph.nodes if node in needed]


def _merge_linears(graph: fx.Graph, group: list[fx.Node]) -> None:
    """Linears of one group over one input become one linear and views of its output (K|V, gate|up)."""
    by_input: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
    for node in group:
        if is_call(node, aten.linear.default):
            args: Any = node.args
            by_input.setdefault((args[0], len(args) > 2), []).append(node)
    for (source, has_bias), linears in by_input.items():
        if len(linears) < 2:
            continue
        first = linears[0]
        with graph.inserting_before(first):
            weights = [
                insert_call(
                    graph, aten.cat.default, ([linear.args[index] for linear in linears], 0), torch.cat
                )
                for index in ((1, 2) if has_bias else (1,))
            ]
            merged = insert_call(graph, aten.linear.default, (source, *weights), F.linear)
            start = 0
            for linear in linears:
                stop = start + int(shape_of(linear)[-1])
                part = insert_call(
                    graph, aten.slice.Tensor, (merged, -1, start, stop), lambda x, _, a, b: x[..., a:b]
                )
                linear.replace_all_uses_with(part)
                start = stop
        for linear in linears:
            graph.erase_node(linear)


def _slices(model: CapturedModel, groups: list[list[fx.Node]], weights: set[fx.Node]) -> tuple[Slice, ...]:
    count = len(model.attentions)
    members = [groups[2 * i : 2 * i + 2] for i in range(count)] + [groups[-1:]]
    slice_of = {node: i for i, parts in enumerate(members) for part in parts for node in part}
    slice_of |= {model.token_ids: -1, model.positions: -1}
    last_use: dict[fx.Node, int] = {}
    for i, parts in enumerate(members):
        sends = model.attentions[i].all_input_nodes if i < count else [model.output]
        uses = [parent for part in parts for node in part for parent in node.all_input_nodes]
        for node in (*uses, *sends):
            last_use[node] = i
    order = {node: index for index, node in enumerate(model.graph.nodes)}

    def context_of(i: int) -> tuple[fx.Node, ...]:
        if i == 0:
            return (model.token_ids, model.positions)
        live = [node for node, home in slice_of.items() if home < i <= last_use.get(node, -1)]
        return tuple(sorted(live, key=order.__getitem__))

    slices = []
    for i, parts in enumerate(members):
        is_last = i == count
        attention = None if is_last else model.attentions[i]
        sent = () if attention is None else (attention.args[:1], attention.args[1:3])
        slices.append(
            Slice(
                layer=None if is_last else i,
                received=model.attentions[i - 1] if i else None,
                nodes=tuple(tuple(part) for part in parts),
                sent=sent,  # type: ignore[arg-type]
                context=context_of(i),
                results=(model.output,) if is_last else context_of(i + 1),
            )
        )
    for i, parts in enumerate(members):
        _check_received(model, i, parts)
    return tuple(slices)


def _check_received(model: CapturedModel, i: int, parts: list[list[fx.Node]]) -> None:
    """Each slice uses no attention output but the one it receives: older ones would have to be carried."""
    allowed = {model.attentions[i - 1]} if i else set()
    for part in parts:
        for node in part:
            foreign = (set(node.all_input_nodes) & set(model.attentions)) - allowed
            assert not foreign, f"slice {i} needs {foreign}"
