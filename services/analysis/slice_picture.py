"""The graph of a converted model as SVG: a column for each different slice, a dashed line for each cut.

Operators stand in the order in which they run; those that only move values are left out and drawn through.
Between two columns stands the attention that the left one sends Q, K and V to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from common.model.report import LAYOUT_OPERATORS, ConversionReport, Sent, SliceReport
from services.analysis.slice_classes import SliceClass, fold_slices, label, producer

COLUMN, GAP, LANES = 230, 190, 64
BOX, STEP, TOP = 22, 34, 110
MARGIN = 24
LABEL_CHARACTERS = 31

STYLE = """
text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }
.title { font-weight: bold; font-size: 13px } .note { fill: #59636e }
.box { fill: #f6f8fa; stroke: #8c959f } .heavy { fill: #ddf4ff; stroke: #0969da }
.kept { fill: #fff8c5; stroke: #9a6700 } .attention { fill: #fbefff; stroke: #8250df }
.edge { fill: none; stroke: #8c959f } .sent { fill: none; stroke: #8250df; stroke-width: 1.6 }
.sending { fill: #8250df; font-weight: bold }
.cut { stroke: #cf222e; stroke-width: 1.6; stroke-dasharray: 7 5 } .cuttext { fill: #cf222e }
"""


def draw_slices(name: str, report: ConversionReport) -> str:
    """The whole picture."""
    classes = fold_slices(report)
    columns = [_Column.of(each, index) for index, each in enumerate(classes)]
    height = max(column.bottom for column in columns) + 70
    width = 2 * MARGIN + len(columns) * (LANES + COLUMN) + (len(columns) - 1) * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{STYLE}</style>',
        '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#8250df"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(MARGIN, 28, f"{name}: {len(report.slices)} slices, cut at {len(report.attentions)} attentions"),
    ]
    for index, column in enumerate(columns):
        parts += column.draw()
        if index + 1 < len(columns):
            parts += _draw_cut(report, column, columns[index + 1], height)
    return "\n".join([*parts, "</svg>\n"])


@dataclass(frozen=True, slots=True)
class _Column:
    """One class of slices. ``rows`` gives each drawn operator its place, after the values taken and
    around the rows that ``sends`` says what was sent in."""

    each: SliceClass
    left: int
    taken: tuple[str, ...]
    rows: dict[int, int]
    sends: dict[int, str]

    @classmethod
    def of(cls, each: SliceClass, index: int) -> "_Column":
        piece = each.example
        taken = tuple(f"{kept.name} {kept.shape}" for kept in piece.context)
        received = () if each.numbers[0] == 0 else ("attention's output",)
        drawn = [i for i, operator in enumerate(piece.operators) if operator.name not in LAYOUT_OPERATORS]
        ends = [] if piece.layer is None else [piece.q_operators, piece.q_operators + piece.kv_operators]
        waiting = list(zip(ends, ("send Q", "send K, V"), strict=False))
        rows: dict[int, int] = {}
        sends: dict[int, str] = {}
        row = len(taken) + len(received)
        for position in [*drawn, len(piece.operators)]:
            while waiting and waiting[0][0] <= position:
                sends[row] = waiting.pop(0)[1]
                row += 1
            if position < len(piece.operators):
                rows[position] = row
                row += 1
        left = MARGIN + LANES + index * (LANES + COLUMN + GAP)
        return cls(each, left, received + taken, rows, sends)

    @property
    def bottom(self) -> int:
        return self.y(max([*self.rows.values(), *self.sends, len(self.taken)])) + BOX

    @property
    def right(self) -> int:
        return self.left + COLUMN

    def y(self, row: int) -> int:
        return TOP + row * STEP

    def draw(self) -> Iterator[str]:
        piece = self.each.example
        yield _text(self.left, 62, self.each.title, "title")
        megabytes = f"{piece.weight_bytes / 1e6:,.2f} MB of weights"
        yield _text(self.left, 80, f"{len(piece.operators)} operators, {megabytes}", "note")
        for position, row in self.rows.items():
            for source in self._sources(position):
                yield self._edge(source, row)
        for row, text in enumerate(self.taken):
            yield from self._box(row, text, "kept")
        for row, text in self.sends.items():
            yield _text(self.left + 8, self.y(row) + 15, f"→ {text}", "sending")
        for position, row in self.rows.items():
            operator = piece.operators[position]
            yield from self._box(row, label(operator), "heavy" if operator.weights else "box")

    def _box(self, row: int, text: str, kind: str) -> Iterator[str]:
        y = self.y(row)
        yield f'<rect class="{kind}" x="{self.left}" y="{y}" width="{COLUMN}" height="{BOX}" rx="4"/>'
        short = text if len(text) <= LABEL_CHARACTERS else f"{text[: LABEL_CHARACTERS - 1]}…"
        yield _text(self.left + 8, y + 15, short)

    def _sources(self, position: int) -> list[int]:
        """Rows of what an operator computes from, through the operators that are not drawn."""
        piece = self.each.example
        found: dict[int, None] = {}
        waiting = [position]
        while waiting:
            operator = piece.operators[waiting.pop()]
            offset = len(self.taken) - len(piece.context)
            found |= dict.fromkeys(offset + index for index in operator.context)
            found |= dict.fromkeys([0] if operator.uses_received else [])
            for parent in operator.inputs:
                if parent in self.rows:
                    found[self.rows[parent]] = None
                else:
                    waiting.append(parent)
        return list(found)

    def _edge(self, source: int, target: int) -> str:
        """Straight to the next row; around the boxes in between otherwise."""
        if target == source + 1:
            x = self.left + COLUMN // 2
            return f'<path class="edge" d="M{x} {self.y(source) + BOX}V{self.y(target)}"/>'
        start, end = self.y(source) + BOX // 2, self.y(target) + BOX // 2
        bulge = self.left - min(12 + 4 * (target - source), LANES + 10)
        return (
            f'<path class="edge" d="M{self.left} {start}C{bulge} {start} {bulge} {end} {self.left} {end}"/>'
        )

    def sent_y(self, sent: Sent | None) -> int:
        """Where the operator that computed Q, K or V stands."""
        position = None if sent is None else producer(self.each.example, sent.operator)
        row = 0 if position is None else self.rows[position]
        return self.y(row) + BOX // 2


def _draw_cut(report: ConversionReport, column: _Column, following: _Column, height: int) -> Iterator[str]:
    """The attention between two columns, what is sent to it, and the cut with what it keeps."""
    piece: SliceReport = column.each.example
    if piece.q is None or piece.k is None or piece.v is None or column.each.attention is None:
        return
    spec = column.each.attention
    cut_x = column.right + GAP // 2 + 38
    kept = report.slices[column.each.numbers[0] + 1].context
    moving = sum(each.token_bytes for each in kept if not each.is_step_constant)
    constant = sum(each.token_bytes for each in kept if each.is_step_constant)
    yield f'<path class="cut" d="M{cut_x} 96V{height - 48}"/>'
    yield _text(column.right + 12, height - 30, f"cut: keeps {moving:,} B per token", "cuttext")
    yield _text(column.right + 12, height - 14, f"and {constant:,} B per token once a step", "cuttext")
    sends = (("Q", piece.q), ("K", piece.k), ("V", piece.v))
    places = [column.sent_y(sent) for _, sent in sends]
    left, box_height = column.right + 62, 96
    top = min(sum(places) // 3 - box_height // 2, height - box_height - 60)
    middle = top + box_height // 2
    for index, ((name, sent), y) in enumerate(zip(sends, places, strict=True)):
        end = top + 24 * (index + 1)
        yield (
            f'<path class="sent" marker-end="url(#to)" d="M{column.right} {y}C{column.right + 40} {y} '
            f'{left - 40} {end} {left} {end}"/>'
        )
        yield _text(column.right + 4, y - 6, f"{name} {sent.token_bytes:,} B")
    output = spec.heads * spec.head_dim * report.element_bytes
    x = following.left
    yield (
        f'<path class="sent" marker-end="url(#to)" d="M{left + 104} {middle}C{x - 20} {middle} '
        f'{left + 120} {TOP + BOX // 2} {x} {TOP + BOX // 2}"/>'
    )
    yield f'<rect class="attention" x="{left}" y="{top}" width="104" height="{box_height}" rx="8"/>'
    shape = f"{spec.heads}/{spec.kv_heads} × {spec.head_dim}"
    window = "" if spec.window is None else f"window {spec.window}"
    for line, text in enumerate(("attention", shape, window, f"out {output:,} B")):
        yield _text(left + 8, top + 24 + 19 * line, text)


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{attribute}>{escape(text)}</text>'
