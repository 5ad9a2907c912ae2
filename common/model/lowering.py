"""One aten call as a Python expression: a tensor method or an operator where there is one, for speed."""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from common.errors import ModelError
from common.model import kernels
from common.model.experts import expert_linear
from common.model.graph import OPEN_END, aten, dtype_of, shape_of

Reference = Callable[[fx.Node], str]
"""A node's name where the expression stands."""


def lower(node: fx.Node, reference: Reference, device: str) -> str:
    """The expression that computes ``node``. Raises ModelError for an operator outside torch's own."""

    def text(value: Any) -> str:
        return _text(value, reference, device)

    args: Any = node.args
    template = TEMPLATES.get(node.target)
    if template is not None and not node.kwargs:
        return template.format(*(text(argument) for argument in args))
    special = SPECIAL.get(node.target)
    if special is not None:
        return special(node, text)
    return _torch_call(node, text)


def _torch_call(node: fx.Node, text: Callable[[Any], str]) -> str:
    target: Any = node.target
    arguments = [text(argument) for argument in node.args]
    arguments += [f"{key}={text(value)}" for key, value in node.kwargs.items()]
    if target in FUNCTIONS:
        return f"{FUNCTIONS[target]}({', '.join(arguments)})"
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace != "aten":
            raise ModelError(f"operator {target} is not torch's own, so the slices cannot run it")
        return f"torch.ops.{target}({', '.join(arguments)})"
    raise ModelError(f"the captured graph calls {target}, which the slices cannot run")


def _text(value: Any, reference: Reference, device: str) -> str:
    match value:
        case fx.Node():
            if isinstance(value.meta.get("val"), torch.SymInt):
                return _integer_text(value)
            return reference(value)
        case list() | tuple():
            return f"[{', '.join(_text(each, reference, device) for each in value)}]"
        case torch.device():
            return device
        case float() if value in (float("inf"), float("-inf")) or value != value:
            return f'float("{value}")'
        case torch.dtype() | torch.memory_format() | torch.layout():
            return str(value)
        case None | bool() | int() | float() | str():
            return repr(value)
    raise ModelError(f"the captured graph holds the constant {value!r}, which has no text")


INTEGER_OPERATORS = {operator.add: "+", operator.mul: "*", operator.sub: "-", operator.floordiv: "//"}


def _integer_text(node: Any) -> str:
    """A size computed from the number of tokens."""
    if isinstance(node, int):
        return repr(node)
    if node.target == aten.sym_size.int:
        return "tokens" if str(node.meta["val"]).startswith("s") else repr(int(node.meta["val"]))
    if node.target in INTEGER_OPERATORS:
        left, right = (_integer_text(argument) for argument in node.args)
        return f"({left} {INTEGER_OPERATORS[node.target]} {right})"
    raise ModelError(f"the captured graph computes a size by {node.target}, which the slices cannot")


def _reshape(node: fx.Node, text: Callable[[Any], str]) -> str:
    """The recorded result shape, the token dimension left for torch to find."""
    sizes = [size if isinstance(size, int) else -1 for size in shape_of(node)]
    source: Any = node.args[0]
    if sizes.count(-1) > 1:
        return f"{text(source)}.reshape({text(node.args[1])})"
    return f"{text(source)}.reshape({', '.join(map(str, sizes))})"


def _slice(node: fx.Node, text: Callable[[Any], str]) -> str:
    defaults = (0, 0, OPEN_END)
    args: Any = (*node.args, *defaults[len(node.args) - 1 :])
    source, dim, start, stop, *step = args
    dim %= len(shape_of(node))
    length = shape_of(node)[dim]
    if step not in ([], [1]) or not isinstance(length, int):
        stops = "" if stop == OPEN_END else text(stop)
        return f"{text(source)}[{':, ' * dim}{text(start or 0)}:{stops}{f':{text(step[0])}' if step else ''}]"
    first = start or 0
    if first < 0:
        first += shape_of(source)[dim]
    return f"{text(source)}.narrow({dim}, {first}, {length})"


def _to_dtype(node: fx.Node, text: Callable[[Any], str]) -> str:
    return f"{text(node.args[0])}.to({dtype_of(node)})"


def _contiguous(node: fx.Node, text: Callable[[Any], str]) -> str:
    return f"{text(node.args[0])}.contiguous()"


def _gelu(node: fx.Node, text: Callable[[Any], str]) -> str:
    approximate = node.kwargs.get("approximate", "none")
    return f"torch.nn.functional.gelu({text(node.args[0])}, approximate={approximate!r})"


def _layer_norm(node: fx.Node, text: Callable[[Any], str]) -> str:
    return f"torch.nn.functional.layer_norm({', '.join(text(argument) for argument in node.args[:5])})"


TEMPLATES: dict[Any, str] = {
    aten.add.Tensor: "{0} + {1}",
    aten.sub.Tensor: "{0} - {1}",
    aten.mul.Tensor: "{0} * {1}",
    aten.div.Tensor: "{0} / {1}",
    aten.neg.default: "-{0}",
    aten.t.default: "{0}.t()",
    aten.transpose.int: "{0}.transpose({1}, {2})",
    aten.unsqueeze.default: "{0}.unsqueeze({1})",
    aten.squeeze.dim: "{0}.squeeze({1})",
    aten.permute.default: "{0}.permute({1})",
    aten.pow.Tensor_Scalar: "{0}.pow({1})",
    aten.mean.dim: "{0}.mean({1}, {2})",
    aten.rsqrt.default: "{0}.rsqrt()",
    aten.cos.default: "{0}.cos()",
    aten.sin.default: "{0}.sin()",
    aten.tanh.default: "{0}.tanh()",
    aten.sigmoid.default: "{0}.sigmoid()",
    aten.relu.default: "{0}.relu()",
    aten.silu.default: "torch.nn.functional.silu({0})",
    aten.split.Tensor: "{0}.split({1}, {2})",
    operator.getitem: "{0}[{1}]",
}

SPECIAL: dict[Any, Callable[[fx.Node, Callable[[Any], str]], str]] = {
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.slice.Tensor: _slice,
    aten._to_copy.default: _to_dtype,
    aten.type_as.default: _to_dtype,
    aten.clone.default: _contiguous,
    aten.gelu.default: _gelu,
    aten.layer_norm.default: _layer_norm,
}

FUNCTIONS: dict[Any, str] = {
    aten.embedding.default: "torch.embedding",
    aten.cat.default: "torch.cat",
    aten.linear.default: "torch.nn.functional.linear",
    torch.cat: "torch.cat",
    torch.addcmul: "torch.addcmul",
    F.rms_norm: "kernels.rms_norm",
    kernels.add_rms_norm: "kernels.add_rms_norm",
    kernels.rotate: "kernels.rotate",
    kernels.rotate_heads: "kernels.rotate_heads",
    kernels.silu_multiply: "kernels.silu_multiply",
    kernels.silu_multiply_halves: "kernels.silu_multiply_halves",
    expert_linear: "expert_linear",
}
