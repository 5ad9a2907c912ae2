"""Graphs that no family has: attentions side by side, and values that no slice can hand on."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from common.errors import ModelError
from common.model.capture import CapturedModel, attention_operator
from common.model.emit import emit
from common.model.slices import cut

HEADS, HEAD_DIM, VOCAB = 2, 4, 11
WIDTH = HEADS * HEAD_DIM


class Toy(torch.nn.Module):
    """An embedding, whatever ``body`` does with two attentions, and a head."""

    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB)
        self.body = body

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embedding(token_ids)))
        return logits


def attend(x: torch.Tensor, layer: int) -> torch.Tensor:
    """[1, T, width] → [1, T, width]"""
    heads = x.view(1, -1, HEADS, HEAD_DIM).transpose(1, 2)
    out: torch.Tensor = attention_operator()(heads * 2, heads, heads + 1, layer, 1.0, None, None)
    return out.reshape(1, -1, WIDTH)


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """The second attention does not need the first; both are needed after it."""
    first, second = attend(x, 0), attend(x.sin(), 1)
    return first * second + x


def doubled_rows(x: torch.Tensor) -> torch.Tensor:
    """What is needed on both sides has two rows a token."""
    doubled = torch.cat([x, x + 1], dim=1)
    y = attend(doubled.view(2, -1, WIDTH)[:1], 0)
    return attend(torch.cat([y, doubled], dim=1).view(3, -1, WIDTH)[:1], 1)


def captured(body: Callable[..., torch.Tensor], layers: tuple[int, int] = (0, 1)) -> CapturedModel:
    attention_operator()
    example = torch.zeros(1, 6, dtype=torch.int64)
    tokens = torch.export.Dim("T", min=2)
    with torch.no_grad():
        exported: Any = torch.export.export(
            Toy(body), (example, example.clone()), dynamic_shapes=({1: tokens}, {1: tokens}), strict=False
        ).run_decompositions({})
    nodes = {node.name: node for node in exported.graph.nodes}
    by_layer = {node.args[3]: node for node in exported.graph.nodes if node.target is attention_operator()}
    signature = exported.graph_signature
    return CapturedModel(
        graph=exported.graph,
        token_ids=nodes[signature.user_inputs[0]],
        positions=nodes[signature.user_inputs[1]],
        output=nodes[signature.user_outputs[0]],
        attentions=tuple(by_layer[layer] for layer in layers),
        attention_specs=(),
        parameters={nodes[node]: name for node, name in signature.inputs_to_parameters.items()},
        constants={},
        base_prefix="",
    )


class OwnToken:
    """Attention as a function of each token's own Q, K and V: [T, heads, head_dim]."""

    def __init__(self) -> None:
        self.output = torch.empty(0)

    def send_q(self, layer: int, q: torch.Tensor) -> None:
        self.output = q * (layer + 1)

    def send_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.output = self.output * k + v


def test_an_attention_s_output_that_is_needed_later_is_kept(tmp_path: Path) -> None:
    model = captured(side_by_side)
    slices = cut(model)
    assert any(model.attentions[0] in node.all_input_nodes for node in slices[2].context)
    source, entries = emit(model, slices, {})
    (tmp_path / "slices.py").write_text(source)
    found: Any = importlib.util.spec_from_file_location("toy_slices", tmp_path / "slices.py")
    module: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    toy, io = Toy(side_by_side), OwnToken()
    weights = dict(toy.named_parameters())
    token_ids = torch.arange(5)[None]
    context: Any = (token_ids, torch.arange(5)[None])
    received = None
    with torch.no_grad():
        for entry in entries:
            tensors = [weights[name] for name in entry.tensors]
            bound = getattr(module, entry.bind)(tensors, linear_of)
            context = getattr(module, entry.run)(io, entry.layer, received, *context, *bound)
            received = io.output
        x = toy.embedding(token_ids)
        expected = toy.head(own_token(x, 0) * own_token(x.sin(), 1) + x)
    torch.testing.assert_close(context, expected)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(F.linear, weight=weight, bias=bias)


def own_token(x: torch.Tensor, layer: int) -> torch.Tensor:
    return x * 2 * (layer + 1) * x + x + 1


def test_a_value_that_is_not_one_row_per_token_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"cat is needed on both sides, and its result \[1, 2\*s"):
        cut(captured(doubled_rows))


def test_an_attention_that_needs_a_later_one_is_refused_by_name() -> None:
    def chained(x: torch.Tensor) -> torch.Tensor:
        return attend(attend(x, 0), 1)

    with pytest.raises(ModelError, match="attention needs a later attention"):
        cut(captured(chained, layers=(1, 0)))
