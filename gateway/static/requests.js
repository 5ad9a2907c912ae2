// The requests that run and the newest that ended, and the timeline of the one that was chosen.

import { byId, element, keep, setText } from "./dom.js";
import { count, NONE, plural, seconds, shortId } from "./format.js";
import { drawTimeline, timelineTable } from "./timeline.js";

const SHOWN = 100;
const OUTPUT = 2; // Its cell, of those after the phase: of how many at most is left out on a phone.
const RUNNING_PHASES = new Set(["queue", "prefill", "transfer", "decode", "recovery"]);

let chosen = null; // An id.
let onChoose = null;

// `choose(id)`: the timeline of that request is wanted, or of none: null.
export function startRequests(choose) {
  onChoose = choose;
}

// `list`: as /api/requests tells it.
export function showRequests(list) {
  const shown = [...list.running, ...list.ended].slice(0, SHOWN);
  byId("requests-none").hidden = shown.length > 0;
  const running = `${count(list.running.length)} running`;
  setText(byId("requests-summary"), `${running}, ${count(list.ended.length)} of the newest that ended`);
  keep(byId("request-rows"), shown, (each) => each.id, newRow, updateRow);
}

function newRow({ id }) {
  const onclick = () => chooseRequest(id);
  const choose = element("button", { type: "button", class: "link", title: id, onclick }, shortId(id));
  const phase = element("span", { class: "phase" });
  const classes = ["spare", "number", "number", "id spare", "number"];
  const others = classes.map((each) => element("td", { class: each }));
  others[OUTPUT].append(element("span"), element("span", { class: "spare" }));
  return element("tr", {}, element("td", {}, choose), element("td", {}, phase), ...others);
}

function updateRow(row, request) {
  const [id, phase, serviceClass, prompt, output, instances, took] = row.children;
  const isChosen = chosen === request.id;
  const isOver = !RUNNING_PHASES.has(request.phase);
  row.className = [isOver ? "over" : "", isChosen ? "chosen" : ""].join(" ").trim();
  id.firstChild.setAttribute("aria-pressed", String(isChosen));
  phase.firstChild.dataset.phase = request.phase;
  const error = request.error ? `: ${request.error.replaceAll("_", " ")}` : "";
  setText(phase.firstChild, request.phase + error);
  setText(serviceClass, request.service_class);
  setText(prompt, count(request.prompt_tokens));
  setText(output.firstChild, count(request.output_tokens));
  setText(output.lastChild, ` / ${count(request.max_tokens)}`);
  setText(instances, walkOf(request));
  setText(took, seconds(request.age_s));
  took.title = isOver ? "" : "so far";
}

function walkOf({ prefill_instance: prefill, decode_instance: decode }) {
  if (!prefill) return NONE;
  return prefill === decode ? prefill : `${prefill} → ${decode}`;
}

function chooseRequest(id) {
  chosen = chosen === id ? null : id;
  for (const row of byId("request-rows").children) {
    row.classList.toggle("chosen", row.dataset.key === chosen);
    row.querySelector("button").setAttribute("aria-pressed", String(row.dataset.key === chosen));
  }
  forgetTimeline();
  onChoose(chosen);
}

// `told`: as /api/requests/ID tells it; null: the gateway, or the one in its place, remembers none.
export function showTimeline(told) {
  if (chosen === null) return;
  const nobody = `This gateway remembers no request ${chosen}.`;
  if (told === null) forgetTimeline(element("p", { class: "hint" }, nobody));
  else if (told.request.id === chosen) drawChosen(told);
}

function drawChosen({ request, spans }) {
  const place = byId("timeline");
  if (place.dataset.of !== request.id) makeTimeline(place, request.id);
  const [, facts, picture, table] = place.children;
  setText(facts, factsOf(request));
  picture.replaceChildren(drawTimeline(spans, request.age_s, Math.max(place.clientWidth, 280)));
  table.lastChild.replaceChildren(timelineTable(spans));
}

function makeTimeline(place, id) {
  place.dataset.of = id;
  const title = element("h3", {}, "Timeline of ", element("span", { class: "id" }, id));
  const table = element("div", { class: "scroller" });
  place.replaceChildren(title, element("p", { class: "hint" }), element("div"),
    element("details", {}, element("summary", {}, "As a table"), table));
}

function forgetTimeline(...words) {
  delete byId("timeline").dataset.of;
  byId("timeline").replaceChildren(...words);
}

function factsOf(request) {
  const latencies = [`TTFT ${seconds(request.ttft_s)}`, `TPOT ${seconds(request.tpot_s)}`];
  const facts = [request.phase, ...latencies, plural(request.output_tokens, "output token")];
  if (request.attempt) facts.push(`continued ${request.attempt === 1 ? "once" : `${request.attempt} times`}`);
  return facts.join(" · ");
}
