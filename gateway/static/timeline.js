// One request's time, as bars: queue, prefill chunks, transfer, decode steps, recovery. And in words, as a
// table.

import { drawn, element } from "./dom.js";
import { bytes, plural, roundSeconds, seconds } from "./format.js";

const LANES = [
  ["queue", "Queue"], ["prefill", "Prefill"], ["transfer", "Transfer"], ["decode", "Decode"],
  ["recovery", "Recovery"],
];
const LANE = 24;
const BAR = 14;
const LEFT = 66;
const RIGHT = 14;
const BOTTOM = 20;
const LEAST_STEP_PX = 3; // Steps closer than that are one bar.

// `spans` as /api/requests/ID tells them; seconds from the request's arrival. `untilS`: how long it has
// lasted.
export function drawTimeline(spans, untilS, width) {
  const lanes = LANES.filter(([kind]) => spans.some((span) => span.kind === kind));
  const lastS = Math.max(untilS, ...spans.map((span) => span.end_s ?? 0), 1e-3);
  const scale = (width - LEFT - RIGHT) / lastS;
  const at = (second) => LEFT + second * scale;
  const height = lanes.length * LANE + BOTTOM;
  const viewBox = `0 0 ${width} ${height}`;
  const picture = drawn("svg", { viewBox, height, role: "img", "aria-label": inWords(spans, lastS) });
  for (const second of ticks(lastS, (width - LEFT) / 80)) {
    const x = at(second);
    const anchor = x > width - 40 ? "end" : second === 0 ? "start" : "middle";
    picture.append(drawn("path", { class: "grid", d: `M${x} 0V${height - BOTTOM + 3}` }),
      drawn("text", { x, y: height - 5, "text-anchor": anchor }, second === 0 ? "0" : roundSeconds(second)));
  }
  lanes.forEach(([kind, title], lane) => {
    const y = lane * LANE + (LANE - BAR) / 2;
    picture.append(drawn("text", { x: 0, y: y + 11 }, title));
    for (const span of spans.filter((each) => each.kind === kind)) {
      const x = at(span.begin_s);
      const barWidth = Math.max(at(span.end_s ?? lastS) - x, 1.5);
      const place = { x, y, width: barWidth, height: BAR, rx: 2 };
      picture.append(drawn("rect", { class: kind, ...place }, drawn("title", {}, tell(span))));
      const steps = stepMarks(span, at, y);
      if (steps) picture.append(steps);
    }
  });
  return picture;
}

// A line at the end of each step, where there is room for lines.
function stepMarks(span, at, y) {
  const ends = span.step_ends_s ?? [];
  if (ends.length < 2) return null;
  if ((at(ends[ends.length - 1]) - at(span.begin_s)) / ends.length < LEAST_STEP_PX) return null;
  const marks = ends.map((end) => `M${at(end).toFixed(1)} ${y}v${BAR}`);
  return drawn("path", { class: "steps", d: marks.join("") });
}

// Round numbers, about `most` of them.
function ticks(lastS, most) {
  const rough = lastS / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  return Array.from({ length: Math.floor(lastS / step + 1e-9) + 1 }, (_, index) => index * step);
}

function tell(span) {
  const parts = [span.kind];
  if (span.instance) parts.push(`at ${span.instance}`);
  if (span.peer) parts.push(`from ${span.peer}`);
  const begin = seconds(span.begin_s);
  if (span.end_s === null) parts.push(`since ${begin}`);
  else parts.push(`${seconds(span.end_s - span.begin_s)}, from ${begin}`);
  const details = detailsOf(span);
  return details ? `${parts.join(" ")}: ${details}` : parts.join(" ");
}

function detailsOf(span) {
  const parts = [];
  if (span.cause) parts.push(span.cause.replaceAll("_", " "));
  if (typeof span.noticed_s === "number") {
    parts.push(`noticed after ${seconds(span.noticed_s - span.begin_s)}`);
  }
  if (span.kind === "decode" && span.tokens) parts.push(plural(span.tokens, "step"));
  else if (span.tokens) parts.push(plural(span.tokens, "token"));
  if (span.kv_bytes) parts.push(`${bytes(span.kv_bytes)} of KV`);
  if (span.attempt) parts.push(`attempt ${span.attempt}`);
  return parts.join(", ");
}

function inWords(spans, lastS) {
  const sums = LANES.map(([kind, title]) => {
    const those = spans.filter((span) => span.kind === kind);
    const took = those.reduce((sum, span) => sum + (span.end_s ?? lastS) - span.begin_s, 0);
    return those.length ? `${title.toLowerCase()} ${seconds(took)}` : null;
  });
  return `${seconds(lastS)} in all: ${sums.filter(Boolean).join(", ")}`;
}

export function timelineTable(spans) {
  const rows = spans.map((span) => {
    const phase = element("span", { class: "phase", "data-phase": span.kind }, span.kind);
    const where = span.peer ? `${span.peer} → ${span.instance ?? ""}` : span.instance ?? "";
    const took = span.end_s === null ? "lasts" : seconds(span.end_s - span.begin_s);
    return element("tr", {},
      element("td", {}, phase),
      element("td", { class: "id" }, where),
      element("td", { class: "number" }, seconds(span.begin_s)),
      element("td", { class: "number" }, took),
      element("td", {}, detailsOf(span)));
  });
  const heads = ["What", "Where", "From", "Took", ""].map((word, index) =>
    element("th", { scope: "col", class: index === 2 || index === 3 ? "number" : null }, word));
  return element("table", {},
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
}
