"""Mixture-of-experts linears: each row multiplied by the weights of its own expert, each expert read once.

transformers' form that can be captured copies an expert's weights for every row that was routed to it
(``bmm(weights[experts], rows)``): gigabytes a step for models of a usual size. The graph's calls of that form
become calls of ``expert_linear``, which the emitted slices import.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from common.model.graph import aten, insert_call, is_call, shape_of


def expert_linear(rows: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """``rows`` [S, in] times ``weights`` [E, out, in] of ``experts`` [S] int64 → [S, out].

    Rows are grouped by expert, so an expert's weights are read once, and only if it has rows. The group
    sizes are needed on the host: on a device, a synchronization a call.
    """
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=weights.shape[0]).tolist()
    groups = torch.split(rows.index_select(0, order), counts)
    results = [F.linear(group, weights[expert]) for expert, group in enumerate(groups) if counts[expert]]
    output = rows.new_empty(rows.shape[0], weights.shape[1])
    return output.index_copy_(0, order, torch.cat(results)) if results else output


def group_expert_linears(graph: fx.Graph) -> None:
    """``squeeze(bmm(weights[experts], unsqueeze(rows)))`` becomes ``expert_linear``."""
    for node in list(graph.nodes):
        found = _match(node)
        if found is None:
            continue
        with graph.inserting_before(node):
            grouped = insert_call(graph, expert_linear, found, _result_like)
        grouped.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        node.replace_all_uses_with(grouped)
    graph.eliminate_dead_code()


def _result_like(rows: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


def _match(squeeze: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(rows, weights, experts) of a batched product of one column each."""
    args: Any = squeeze.args
    if not is_call(squeeze, aten.squeeze.dim) or args[1] not in (-1, 2):
        return None
    product: Any = args[0]
    if not is_call(product, aten.bmm.default):
        return None
    gathered, column = product.args
    if not (is_call(gathered, aten.index.Tensor) and is_call(column, aten.unsqueeze.default)):
        return None
    weights, indices = gathered.args
    if len(shape_of(weights)) != 3 or len(indices) != 1 or column.args[1] not in (-1, 2):
        return None
    return column.args[0], weights, indices[0]
