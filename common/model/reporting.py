"""Writes down how a captured model was cut, from its slices."""

from typing import Any

import torch
from torch import fx

from common.model.capture import CapturedModel
from common.model.graph import dependents_only_on, module_of, operator_name, shape_of, token_bytes
from common.model.report import (
    LAYOUT_OPERATORS,
    REPORT_VERSION,
    ConversionReport,
    Kept,
    Operator,
    Sent,
    SliceReport,
)
from common.model.slices import Slice, step_constants
from common.spec import ElementType


def report_of(
    model: CapturedModel, slices: tuple[Slice, ...], architecture: str, element_type: ElementType
) -> ConversionReport:
    reporter = _Reporter(model)
    reports = tuple(reporter.slice_report(piece) for piece in slices)
    names = {name for each in reports for name in each.weights}
    return ConversionReport(
        version=REPORT_VERSION,
        architecture=architecture,
        element_type=element_type,
        element_bytes=model.output.meta["val"].dtype.itemsize,
        attentions=model.attention_specs,
        slices=reports,
        weight_bytes=sum(reporter.weight_bytes[name] for name in names),
    )


class _Reporter:
    def __init__(self, model: CapturedModel) -> None:
        self._names = model.parameters
        self._weights = dependents_only_on(model.graph, {*model.parameters, *model.constants})
        self._step_constants = step_constants(model)
        self.weight_bytes = {
            name: node.meta["val"].numel() * node.meta["val"].dtype.itemsize
            for node, name in self._names.items()
        }

    def slice_report(self, piece: Slice) -> SliceReport:
        nodes = [node for part in piece.nodes for node in part]
        index = {node: position for position, node in enumerate(nodes)}
        context = {node: position for position, node in enumerate(piece.context)}
        operators = tuple(self._operator(piece, node, index, context) for node in nodes)
        weights = tuple(dict.fromkeys(name for operator in operators for name in operator.weights))
        sent = [_sent(node, index) for group in piece.sent for node in group]
        q, k, v = sent or (None, None, None)
        return SliceReport(
            layer=piece.layer,
            operators=operators,
            q_operators=len(piece.nodes[0]) if sent else 0,
            kv_operators=len(piece.nodes[1]) if sent else 0,
            q=q,
            k=k,
            v=v,
            context=tuple(self._kept(node) for node in piece.context),
            weights=weights,
            weight_bytes=sum(self.weight_bytes[name] for name in weights),
            least_bytes=piece.least_bytes,
        )

    def _operator(
        self, piece: Slice, node: fx.Node, index: dict[fx.Node, int], context: dict[fx.Node, int]
    ) -> Operator:
        parents = node.all_input_nodes
        weights = tuple(dict.fromkeys(name for parent in parents for name in self._files(parent)))
        is_merged = weights and "nn_module_stack" not in node.meta
        return Operator(
            name=operator_name(node),
            module=weights[0].rsplit(".", 2)[0] if is_merged else module_of(node),
            weights=weights,
            inputs=tuple(index[parent] for parent in parents if parent in index),
            context=tuple(context[parent] for parent in parents if parent in context),
            uses_received=piece.received is not None and piece.received in parents,
        )

    def _files(self, node: fx.Node) -> list[str]:
        """The weights that a weight-only value is made of."""
        if node in self._names:
            return [self._names[node]]
        if node not in self._weights:
            return []
        return [name for parent in node.all_input_nodes for name in self._files(parent)]

    def _kept(self, node: fx.Node) -> Kept:
        sizes = ("T" if isinstance(size, torch.SymInt) else str(size) for size in shape_of(node))
        source = _computed(node)
        return Kept(
            name=source.name if source.op == "placeholder" else operator_name(source),
            module=module_of(source),
            shape=" × ".join(sizes),
            token_bytes=token_bytes(node) or 0,
            is_step_constant=node in self._step_constants,
        )


def _computed(node: fx.Node) -> fx.Node:
    """What a value is a view, a sign or a rearrangement of."""
    passing = LAYOUT_OPERATORS | {"neg", "cat"}
    while node.op == "call_function" and operator_name(node) in passing and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _sent(node: Any, index: dict[fx.Node, int]) -> Sent:
    return Sent(operator=index.get(node), token_bytes=token_bytes(node) or 0)
