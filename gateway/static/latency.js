// What clients saw within the last minute, as tiles, each with its course since the page was opened.

import { byId, drawn, element, keep, setAttributes, setText } from "./dom.js";
import { count, rate, roundSeconds, seconds, share } from "./format.js";

const KEPT = 180; // Values of a course, one a second.
const LEAST_SHOWN = 30;
const ALL = "all";

const courses = new Map(); // By class and tile.
let latest = null;

export function startLatency() {
  byId("class").addEventListener("change", () => latest && draw());
}

// `view`: as /api/latency tells it.
export function showLatency(view) {
  latest = view;
  const names = [ALL, ...view.classes.map((each) => each.service_class)];
  keep(byId("class"), names, (name) => name, (name) => element("option", { value: name }, name), () => {});
  for (const each of [view.all, ...view.classes]) {
    for (const tile of tilesOf(view, each)) remember(`${each.service_class} ${tile.title}`, tile.course);
  }
  draw();
}

function remember(key, value) {
  const course = courses.get(key) ?? [];
  course.push(value);
  if (course.length > KEPT) course.shift();
  courses.set(key, course);
}

function draw() {
  const name = byId("class").value;
  const one = latest.classes.find((each) => each.service_class === name) ?? latest.all;
  keep(byId("tiles"), tilesOf(latest, one), (tile) => tile.title, newTile, (node, tile) =>
    updateTile(node, tile, courses.get(`${one.service_class} ${tile.title}`)));
}

function tilesOf(view, one) {
  // Those of requests that go on are known of all classes together.
  const [tokensPerS, unit] = one.service_class === ALL
    ? [view.tokens_per_s, "tokens/s now"] : [one.tokens_per_s, "tokens/s of ended"];
  const kept = one.requests
    ? `${share(one.attainment)} of ${count(one.requests)} as promised`
    : "none has ended";
  return [
    timeTile("TTFT", one.ttft_s, one.objectives?.ttft_s),
    timeTile("TPOT", one.tpot_s, one.objectives?.tpot_s),
    { title: "Goodput", value: rate(one.goodput_requests_per_s), unit: "requests/s",
      course: one.goodput_requests_per_s, more: kept },
    { title: "Output", value: rate(tokensPerS), unit,
      course: tokensPerS, more: `${rate(one.goodput_tokens_per_s)} tokens/s of ended as promised` },
    { title: "Open requests", value: count(view.open_requests), unit: "", course: view.open_requests,
      more: `${count(one.requests)} ended in ${roundSeconds(Math.round(view.window_s))}` },
  ];
}

function timeTile(title, times, promised) {
  const tails = times ? `p90 ${seconds(times.p90_s)} · p99 ${seconds(times.p99_s)}` : "none has ended";
  const more = promised ? `${tails} · promised ${roundSeconds(promised)}` : tails;
  return { title, value: seconds(times?.p50_s), unit: "p50", course: times?.p50_s ?? null, more };
}

function newTile() {
  const value = element("p", { class: "value" }, element("span"), " ", element("small"));
  const picture = drawn("svg", { preserveAspectRatio: "none", "aria-hidden": "true" }, drawn("polyline"));
  return element("div", { class: "tile" }, element("h2"), value, picture, element("p", { class: "more" }));
}

function updateTile(node, tile, course) {
  const [title, value, picture, more] = node.children;
  setText(title, tile.title);
  setText(value.firstElementChild, tile.value);
  setText(value.lastElementChild, tile.unit);
  setText(more, tile.more);
  more.title = tile.more;
  const width = Math.max(course.length, LEAST_SHOWN);
  setAttributes(picture, { viewBox: `0 0 ${width} 24` });
  setAttributes(picture.firstElementChild, { points: pointsOf(course, width) });
}

// The newest at the right; what was not known leaves the line where it was.
function pointsOf(course, width) {
  const most = Math.max(...course.map((value) => value ?? 0)) || 1;
  return course.map((value, index) => [width - course.length + index, value])
    .filter(([, value]) => value !== null)
    .map(([x, value]) => `${x},${(22 - 20 * (value / most)).toFixed(1)}`).join(" ");
}
