"""What in a model stops its capture, named: the module or the line of its code."""

import linecache
import re
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

STATE_CLASSES = re.compile(
    "^(?!.*(Layer|Block|Model|LM)$).*(Mamba|Mixer|ShortConv|DeltaNet|Recurrent|SSM|LightningAttention)"
)
"""Modules that keep state beside the KV cache, as transformers names their classes."""

ATTENTION_CLASSES = re.compile("Attention$")

TRACED = re.compile(r"/transformers/models/|/transformers/modeling_rope_utils|/transformers/integrations/moe")
"""Files whose code is the model's, not the machinery around it."""


def modules_in_the_way(model: Any) -> str:
    """The first module that keeps state of its own, or else computes attention in its own code."""
    state = state_module(model)
    if state:
        return state
    attention = _first_module(model, ATTENTION_CLASSES)
    if attention:
        return f"{attention} computes attention in its own code"
    return "none of its modules takes attention from outside"


def state_module(model: Any) -> str:
    """The first module that keeps state beside the KV cache; empty where there is none."""
    found = _first_module(model, STATE_CLASSES)
    return f"{found} keeps state that is not a KV cache" if found else ""


def _first_module(model: Any, pattern: re.Pattern[str]) -> str:
    for name, module in model.named_modules():
        if pattern.search(type(module).__name__):
            return f"{type(module).__name__} at {name}"
    return ""


def place_of(model: Any, error: BaseException) -> str:
    """The line of the model's own code that raised, and its module; or else the module that keeps state.

    Empty where there is neither.
    """
    frames = [frame for frame in _frames(error) if TRACED.search(frame[0].f_code.co_filename)]
    if not frames:
        return state_module(model)
    frame, number = frames[-1]
    line = linecache.getline(frame.f_code.co_filename, number).strip()
    names = {module: name for name, module in model.named_modules()}
    for outer, _ in reversed(frames):
        module = outer.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and module in names:
            return f"at `{line}` in {type(module).__name__} {names[module]}".rstrip()
    return f"at `{line}`"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Of the first exception of the chain, outermost first."""
    while error.__cause__ is not None:
        error = error.__cause__
    yield from traceback.walk_tb(error.__traceback__)
