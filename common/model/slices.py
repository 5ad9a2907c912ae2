"""Where a captured graph is cut: at every attention, by a minimum cut, with Q first (Lamina 4.2).

Slice i takes what attention i−1 returned, computes Q of layer i and sends it, computes K and V and sends
them, and returns its *context*: what later slices need of what is computed by then. Which values those are
is a minimum cut between what Q, K and V need and what attention i's output leads to; its weights are bytes
per token. Two kinds of values stand apart. Weights belong to every slice that reads them. *Step constants*,
functions of the positions alone such as rotary tables, are computed once a step, in the first slice. The
last slice computes the logits.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from common.errors import ModelError
from common.model.capture import CapturedModel
from common.model.fusions import fuse_views
from common.model.graph import (
    aten,
    dependents_only_on,
    insert_call,
    is_call,
    module_of,
    operator_name,
    shape_of,
    token_bytes,
)
from common.model.minimum_cut import Cut, Uncuttable, minimum_cut


@dataclass(frozen=True, slots=True)
class Slice:
    """``layer``: whose Q, K, V it sends; None for the last one, which returns ``results`` = (logits,).

    ``received`` is the attention node whose output it takes (None: the first). ``nodes`` are in three parts:
    before Q is sent, before K and V are sent, and what can run while attention does. ``context`` comes in,
    ``results`` go out (the next slice's context). ``least_bytes`` is what the context's part that changes in
    every layer would be per token if nothing ran beside attention; None for the last slice.
    """

    layer: int | None
    received: fx.Node | None
    nodes: tuple[tuple[fx.Node, ...], ...]
    sent: tuple[tuple[fx.Node, ...], ...]
    context: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    least_bytes: int | None


def cut(model: CapturedModel) -> tuple[Slice, ...]:
    """One slice more than attentions. Merges linears on the way, never Q's with K's or V's.

    Raises ModelError, naming the operator, for a graph that attentions do not divide.
    """
    for group in _send_groups(model):
        _merge_linears(model.graph, group)
    fuse_views(model.graph)
    return _Cutter(model).slices()


def step_constants(model: CapturedModel) -> set[fx.Node]:
    """What depends on the step's positions and on weights alone."""
    weights = dependents_only_on(model.graph, {*model.parameters, *model.constants})
    known = dependents_only_on(model.graph, {*weights, *_sizes(model.graph), model.positions})
    return {node for node in known if node not in weights and isinstance(node.meta["val"], torch.Tensor)}


def _sizes(graph: fx.Graph) -> set[fx.Node]:
    """In no slice: every slice reads the number of tokens from its own input."""
    return {node for node in graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)}


# -- merging ------------------------------------------------------------------------------------------------


def _send_groups(model: CapturedModel) -> list[list[fx.Node]]:
    """What each send needs beyond the ones before it: Q₀, KV₀, Q₁, KV₁, …, and the rest."""
    weights = dependents_only_on(model.graph, {*model.parameters, *model.constants})
    placed = {*weights, *_sizes(model.graph), *model.attentions, model.token_ids, model.positions}
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


# -- cutting ------------------------------------------------------------------------------------------------


class _Cutter:
    """Goes through the attentions in order; ``placed`` is what earlier slices have computed or received."""

    def __init__(self, model: CapturedModel) -> None:
        self._model = model
        self._weights = dependents_only_on(model.graph, {*model.parameters, *model.constants})
        self._constants = step_constants(model)
        apart = {*self._weights, *_sizes(model.graph), *self._constants}
        values = [node for node in model.graph.nodes if node not in apart and node.op != "output"]
        self._users = {node: [user for user in node.users if user.op != "output"] for node in values}
        self._bytes = {node: token_bytes(node) for node in values}
        self._placed = {*self._weights, *_sizes(model.graph), model.token_ids, model.positions}

    def slices(self) -> tuple[Slice, ...]:
        parts: list[list[list[fx.Node]]] = []
        least: list[int | None] = []
        for attention in self._model.attentions:
            sends, least_bytes = self._slice_before(attention)
            parts.append(sends)
            least.append(least_bytes)
        rest = _ancestors(self._model.graph, (self._model.output,), self._placed)
        return self._assemble([*parts, [rest]], [*least, None])

    def _slice_before(self, attention: fx.Node) -> tuple[list[list[fx.Node]], int]:
        """The parts before Q, before K and V, and beside attention; the minimum cut's bytes."""
        graph, is_first = self._model.graph, attention is self._model.attentions[0]
        needs_q = _ancestors(graph, attention.args[:1], self._placed)
        needs_kv = _ancestors(graph, attention.args[1:3], self._placed)
        beside = _ancestors(graph, self._constants, self._placed) if is_first else []
        after = self._descendants(attention)
        for node in (*needs_q, *needs_kv):
            if node in self._model.attentions:
                raise ModelError(f"{describe(attention)} needs a later attention, {describe(node)}")
        early = {node for node in self._users if node in self._placed}
        least = self._cut(attention, early, after)
        heavy = [
            node for node in self._users if node not in early and node not in after and self._is_heavy(node)
        ]
        if heavy:
            overlapped = set(_ancestors(graph, heavy, set(self._placed)))
            chosen = self._cut(attention, early | overlapped, after)
        else:
            chosen = least
        beside += [node for node in chosen.before if node not in early]
        self._placed |= {*chosen.before, attention}
        order = {node: index for index, node in enumerate(graph.nodes)}
        return [needs_q, needs_kv, sorted(beside, key=order.__getitem__)], least.size

    def _is_heavy(self, node: fx.Node) -> bool:
        """Whether it multiplies by a weight matrix: worth computing while others compute attention."""
        if is_call(node, aten.embedding.default):
            return False
        matrices = (parent for parent in node.all_input_nodes if parent in self._weights)
        return any(len(shape_of(matrix)) > 1 for matrix in matrices)

    def _cut(
        self, attention: fx.Node, early: AbstractSet[fx.Node], after: AbstractSet[fx.Node]
    ) -> Cut[fx.Node]:
        """With the attention itself taken out: what it is sent is not kept."""
        users = {node: each for node, each in self._users.items() if node is not attention}
        for sent in attention.all_input_nodes:
            if sent in users:
                users[sent] = [user for user in users[sent] if user is not attention]
        try:
            return minimum_cut(users, self._bytes, early, after - {attention})
        except Uncuttable as exc:
            node: Any = exc.value
            raise ModelError(
                f"the graph cannot be cut at an attention: {describe(node)} is needed on both sides, and its "
                f"result {_shape_text(node)} is not one row per token"
            ) from None

    def _descendants(self, attention: fx.Node) -> set[fx.Node]:
        found = {attention}
        for node in self._users:
            if any(parent in found for parent in node.all_input_nodes):
                found.add(node)
        return found

    def _assemble(
        self, parts: Sequence[list[list[fx.Node]]], least: Sequence[int | None]
    ) -> tuple[Slice, ...]:
        model, count = self._model, len(self._model.attentions)
        homes = {node: i for i, each in enumerate(parts) for part in each for node in part}
        homes |= {model.token_ids: -1, model.positions: -1}
        homes |= {attention: i + 1 for i, attention in enumerate(model.attentions)}
        last_use: dict[fx.Node, int] = {}
        for i, each in enumerate(parts):
            sends = model.attentions[i].all_input_nodes if i < count else [model.output]
            uses = [parent for part in each for node in part for parent in node.all_input_nodes]
            last_use |= dict.fromkeys([*uses, *sends], i)
        order = {node: index for index, node in enumerate(model.graph.nodes)}

        def context_of(i: int) -> tuple[fx.Node, ...]:
            if i == 0:
                return (model.token_ids, model.positions)
            live = [node for node, home in homes.items() if home < i <= last_use.get(node, -1)]
            return tuple(sorted(live, key=lambda node: (node in self._constants, order[node])))

        slices = []
        for i, each in enumerate(parts):
            args: Any = model.attentions[i].args if i < count else ()
            slices.append(
                Slice(
                    layer=i if i < count else None,
                    received=model.attentions[i - 1] if i else None,
                    nodes=tuple(tuple(part) for part in each),
                    sent=(args[:1], args[1:3]) if i < count else (),
                    context=context_of(i),
                    results=context_of(i + 1) if i < count else (model.output,),
                    least_bytes=least[i],
                )
            )
        return tuple(slices)


def describe(node: fx.Node) -> str:
    """An operator and where in the model's code it stands, as errors name it."""
    module = module_of(node)
    return f"{operator_name(node)} in {module}" if module else operator_name(node)


def _shape_text(node: fx.Node) -> str:
    value = node.meta["val"]
    tensors = [value] if isinstance(value, torch.Tensor) else list(value)
    return " and ".join(f"[{', '.join(map(str, tensor.shape))}]" for tensor in tensors)
