"""Some consecutive decode steps of a trace as SVG, with what every service did meanwhile.

A band is a track; slices within slices lie below them. What is narrower than a pixel is drawn once a pixel.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from common.errors import LauncherError
from common.timeline import EventKind, name_of
from common.timeline_events import DECODE_STEP
from services.tracing.layout import Layout, Slice, Track

WIDTH, LABEL_WIDTH, MARGIN = 1200, 190, 12
ROW_HEIGHT, BAND_GAP, SERVICE_GAP = 16, 4, 10
LETTER_WIDTH = 6.2
TICKS = 8
COLORS: dict[EventKind, tuple[str, str]] = {
    "step": ("#cfd8dc", "step (rest: Python)"),
    "compute": ("#64b5f6", "computing (a color a batch)"),
    "exchange": ("#ffb74d", "sending and taking"),
    "waiting": ("#fff3c4", "waiting"),
    "span": ("#b39ddb", "event loop"),
    "lane": ("#a5d6a7", "calls and transfers"),
}
BATCH_COLORS = ("#64b5f6", "#4db6ac", "#7986cb", "#4dd0e1", "#9575cd", "#81c784")
"""Of computing, by the batch that it is for: so a rotation is seen."""


@dataclass(frozen=True, slots=True)
class Window:
    begin_ns: int
    end_ns: int

    def place(self, time_ns: int) -> float:
        """Its pixel, from the left edge; times outside lie on the edges."""
        inside_ns = min(max(time_ns, self.begin_ns), self.end_ns) - self.begin_ns
        scale = (WIDTH - LABEL_WIDTH - MARGIN) / (self.end_ns - self.begin_ns)
        return LABEL_WIDTH + inside_ns * scale

    def shows(self, each: Slice) -> bool:
        return each.begin_ns < self.end_ns and each.end_ns > self.begin_ns


def draw_steps(layout: Layout, steps: int) -> bytes:
    """``steps`` decode steps from the trace's middle. Raises LauncherError where it has not so many."""
    window = _choose_window(layout, steps)
    parts: list[str] = []
    y = 3 * ROW_HEIGHT
    for service in layout.services:
        tracks = [track for track in service.tracks if any(map(window.shows, track.slices))]
        if not tracks:
            continue
        parts.append(_text(MARGIN, y + ROW_HEIGHT - 4, service.service.service_id, "bold"))
        y += ROW_HEIGHT
        for track in tracks:
            bars, depth = _band(track, window, y)
            parts += [_text(MARGIN + 10, y + ROW_HEIGHT - 4, track.name), *bars]
            y += depth * ROW_HEIGHT + BAND_GAP
        y += SERVICE_GAP
    parts += _axis(window, y)
    height = y + 2 * ROW_HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    )
    return "\n".join([head, *_legend(), *parts, "</svg>\n"]).encode()


def _choose_window(layout: Layout, steps: int) -> Window:
    """Of the track that has most decode steps."""
    found: list[Slice] = []
    for service in layout.services:
        for track in service.tracks:
            own = [each for each in track.slices if each.name == name_of(DECODE_STEP)]
            found = max(found, own, key=len)
    if not found:
        raise LauncherError("no decode step was recorded: send requests of several tokens meanwhile")
    if len(found) < steps:
        raise LauncherError(
            f"{len(found)} decode steps were recorded on one track, {steps} are to be drawn: record for"
            " longer (--duration-s), or draw fewer (--svg-steps)"
        )
    first = (len(found) - steps) // 2
    return Window(found[first].begin_ns, found[first + steps - 1].end_ns)


def _band(track: Track, window: Window, y: float) -> tuple[list[str], int]:
    """The track's slices as bars, and how many rows they take."""
    bars: list[str] = []
    depth = 1
    enclosing: list[Slice] = []
    drawn_until: dict[int, float] = {}
    for each in filter(window.shows, track.slices):
        while enclosing and enclosing[-1].end_ns <= each.begin_ns:
            enclosing.pop()
        level = len(enclosing)
        enclosing.append(each)
        depth = max(depth, level + 1)
        left, right = window.place(each.begin_ns), window.place(each.end_ns)
        if right < drawn_until.get(level, 0.0):
            continue
        drawn_until[level] = max(left + 1, right)
        bars.append(_bar(each, left, max(0.6, right - left), y + level * ROW_HEIGHT))
    return bars, depth


def _bar(each: Slice, x: float, width: float, y: float) -> str:
    color = COLORS[each.kind][0]
    if each.kind == "compute":
        color = BATCH_COLORS[each.values.get("batch", 0) % len(BATCH_COLORS)]
    values = ", ".join(f"{label} {value}" for label, value in each.values.items())
    title = escape(f"{each.name}, {each.duration_ns / 1e6:.3f} ms{', ' * bool(values)}{values}")
    bar = (
        f'<rect x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="{ROW_HEIGHT - 2}" fill="{color}">'
        f"<title>{title}</title></rect>"
    )
    return bar + _text(x + 3, y + ROW_HEIGHT - 4, each.name) if _fits(each.name, width) else bar


def _fits(text: str, width: float) -> bool:
    return len(text) * LETTER_WIDTH + 4 < width


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(text)}</text>'


def _legend() -> Iterator[str]:
    x = float(MARGIN)
    for color, meaning in COLORS.values():
        yield f'<rect x="{x:.1f}" y="8" width="14" height="14" fill="{color}"/>'
        yield _text(x + 19, 19, meaning)
        x += 19 + len(meaning) * LETTER_WIDTH + 20


def _axis(window: Window, y: float) -> Iterator[str]:
    """Milliseconds since the first step began."""
    span_ms = (window.end_ns - window.begin_ns) / 1e6
    power = 10 ** math.floor(math.log10(span_ms / TICKS))
    step_ms = next(factor * power for factor in (1, 2, 5, 10) if factor * power * TICKS >= span_ms)
    for index in range(math.floor(span_ms / step_ms) + 1):
        x = window.place(window.begin_ns + round(index * step_ms * 1e6))
        yield f'<path d="M{x:.1f} {2 * ROW_HEIGHT}V{y}" stroke="#90a4ae" stroke-width="0.5"/>'
        label = f"{index * step_ms:g} ms"
        if _fits(label, WIDTH - x):
            yield _text(x + 2, y + ROW_HEIGHT - 4, label)
