"""Equal slices of a converted model shown once, and the words for what is in them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from common.model.report import LAYOUT_OPERATORS, ConversionReport, Operator, SliceReport
from common.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class SliceClass:
    """Slices that differ only in their layer; ``example`` is the first of them."""

    numbers: tuple[int, ...]
    example: SliceReport
    attention: AttentionSpec | None

    @property
    def title(self) -> str:
        return f"{'slice' if len(self.numbers) == 1 else 'slices'} {ranges(self.numbers)}"


def fold_slices(report: ConversionReport) -> tuple[SliceClass, ...]:
    """In the order of their first slices."""
    members: dict[bytes, list[int]] = {}
    for number, piece in enumerate(report.slices):
        members.setdefault(_key(report, number, piece), []).append(number)
    return tuple(
        SliceClass(tuple(numbers), report.slices[numbers[0]], attention_of(report, numbers[0]))
        for numbers in members.values()
    )


def attention_of(report: ConversionReport, number: int) -> AttentionSpec | None:
    """The attention that a slice sends to; None for the last."""
    return report.attentions[number] if number < len(report.attentions) else None


def _key(report: ConversionReport, number: int, piece: SliceReport) -> bytes:
    """Equal for slices that do the same with other layers' weights."""

    def relative(name: str) -> str:
        return re.sub(r"(?<=\.)\d+(?=\.|$)", lambda digits: f"{int(digits[0]) - number:+d}", name)

    operators = [
        msgspec.structs.replace(
            operator, module=relative(operator.module), weights=tuple(map(relative, operator.weights))
        )
        for operator in piece.operators
    ]
    context = [(kept.token_bytes, kept.is_step_constant) for kept in piece.context]
    sends = (piece.q_operators, piece.kv_operators, piece.q, piece.k, piece.v, piece.least_bytes)
    return msgspec.json.encode((operators, context, sends, attention_of(report, number), piece.layer is None))


def ranges(numbers: Sequence[int]) -> str:
    """``[1, 2, 3, 5]`` → ``1–3, 5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


def label(operator: Operator) -> str:
    """``linear q_proj``: the operator and the modules whose weights it reads."""
    names = dict.fromkeys(_module_name(weight) for weight in operator.weights)
    return f"{operator.name} {' | '.join(names)}" if names else operator.name


def _module_name(weight: str) -> str:
    parts = weight.removesuffix(".weight").removesuffix(".bias").split(".")
    return parts[-1]


def computing(operators: Iterable[Operator]) -> list[Operator]:
    return [operator for operator in operators if operator.name not in LAYOUT_OPERATORS]


def producer(piece: SliceReport, position: int | None) -> int | None:
    """The operator that computes what a layout operator passes on; None where it came with the context."""
    while position is not None and piece.operators[position].name in LAYOUT_OPERATORS:
        inputs = piece.operators[position].inputs
        position = inputs[0] if inputs else None
    return position
