"""How a model was cut, as a value: what ``lamella convert --explain`` shows and the cache keeps.

Written beside the converted program (``report.json``), so that it can be read without torch.
"""

from pathlib import Path

import msgspec

from common.errors import ModelError, reason_of
from common.spec import AttentionSpec, ElementType

REPORT_VERSION = 1
REPORT_FILE = "report.json"

_MOVING = "view reshape transpose permute t unsqueeze squeeze expand slice select split split_with_sizes"
LAYOUT_OPERATORS = frozenset([*_MOVING.split(), "getitem", "clone", "alias", "_unsafe_view", "contiguous"])
"""What moves or names values and computes none: counted, but not listed or drawn."""


class Operator(msgspec.Struct, frozen=True):
    """One call of a slice. ``inputs`` are indices into its operators, ``context`` into its context.

    ``module`` is where it stands in the model's code. ``weights`` are the tensors' names in the files.
    """

    name: str
    module: str
    weights: tuple[str, ...]
    inputs: tuple[int, ...]
    context: tuple[int, ...]
    uses_received: bool


class Sent(msgspec.Struct, frozen=True):
    """Q, K or V: the index of the operator that produces it (None: it was in the context)."""

    operator: int | None
    token_bytes: int


class Kept(msgspec.Struct, frozen=True):
    """A value that crosses a cut. ``shape`` counts tokens as T. Step constants are computed once a step."""

    name: str
    module: str
    shape: str
    token_bytes: int
    is_step_constant: bool


class SliceReport(msgspec.Struct, frozen=True):
    """``q_operators`` and ``kv_operators`` count what runs before each send; the rest runs beside attention.

    ``context`` crosses the cut before the slice. ``least_bytes`` is the minimum cut after it, per token and
    without step constants; the slice keeps more only where it computes beside attention. The last slice has
    no layer, sends nothing and keeps nothing.
    """

    layer: int | None
    operators: tuple[Operator, ...]
    q_operators: int
    kv_operators: int
    q: Sent | None
    k: Sent | None
    v: Sent | None
    context: tuple[Kept, ...]
    weights: tuple[str, ...]
    weight_bytes: int
    least_bytes: int | None


class ConversionReport(msgspec.Struct, frozen=True):
    """``weight_bytes`` counts a tensor that several slices read once."""

    version: int
    architecture: str
    element_type: ElementType
    element_bytes: int
    attentions: tuple[AttentionSpec, ...]
    slices: tuple[SliceReport, ...]
    weight_bytes: int


def save_report(conversion: Path, report: ConversionReport) -> None:
    (conversion / REPORT_FILE).write_bytes(msgspec.json.encode(report))


def load_report(conversion: Path) -> ConversionReport:
    """Raises ModelError where the file is gone or of another version."""
    path = conversion / REPORT_FILE
    try:
        report = msgspec.json.decode(path.read_bytes(), type=ConversionReport)
    except (OSError, msgspec.MsgspecError) as exc:
        raise ModelError(f"{path}: cannot be read: {reason_of(exc)}; delete {conversion}") from exc
    if report.version != REPORT_VERSION:
        raise ModelError(f"{path}: version {report.version}, not {REPORT_VERSION}; delete {conversion}")
    return report
