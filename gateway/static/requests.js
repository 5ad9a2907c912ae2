// The requests that run and the newest that ended, and the timeline of the one that was chosen.

import { read, wordsOf } from "./api.js";
import { byId, element, keep, setText } from "./dom.js";
import { count, NONE, plural, seconds, shortId } from "./format.js";
import { drawTimeline, timelineTable } from "./timeline.js";

const SHOWN = 100;
const RUNNING_PHASES = new Set(["queue", "prefill", "transfer", "decode", "recovery"]);

let chosen = null;
let isAsking = false;

// `list`: as /api/requests tells it.
export function showRequests(list) {
  const shown = [...list.running, ...list.ended].slice(0, SHOWN);
  byId("requests-none").hidden = shown.length > 0;
  setText(byId("requests-summary"), `${count(list.running.length)} running, ${count(list.ended.length)} of the newest that ended`);
  keep(byId("request-rows"), shown, (each) => each.id, newRow, updateRow);
  // Who ended is asked for once more, then its timeline stands still.
  if (chosen && !chosen.isOver) showTimeline();
}

function newRow({ id }) {
  const choose = element("button", { type: "button", class: "link", title: id, onclick: () => chooseRequest(id) }, shortId(id));
  return element("tr", {}, element("td", {}, choose), element("td", {}, element("span", { class: "phase" })), element("td", { class: "spare" }),
    element("td", { class: "number" }), element("td", { class: "number" }), element("td", { class: "id spare" }), element("td", { class: "number" }));
}

function updateRow(row, request) {
  const [id, phase, serviceClass, prompt, output, instances, age] = row.children;
  const isChosen = chosen?.id === request.id;
  row.className = [RUNNING_PHASES.has(request.phase) ? "" : "over", isChosen ? "chosen" : ""].join(" ").trim();
  id.firstChild.setAttribute("aria-pressed", String(isChosen));
  phase.firstChild.dataset.phase = request.phase;
  setText(phase.firstChild, request.error ? `${request.phase}: ${request.error.replaceAll("_", " ")}` : request.phase);
  setText(serviceClass, request.service_class);
  setText(prompt, count(request.prompt_tokens));
  setText(output, `${count(request.output_tokens)} / ${count(request.max_tokens)}`);
  setText(instances, walkOf(request));
  setText(age, seconds(request.age_s));
}

function walkOf({ prefill_instance: prefill, decode_instance: decode }) {
  if (!prefill) return NONE;
  return prefill === decode ? prefill : `${prefill} → ${decode}`;
}

function chooseRequest(id) {
  chosen = chosen?.id === id ? null : { id, isOver: false };
  for (const row of byId("request-rows").children) {
    row.classList.toggle("chosen", row.dataset.key === chosen?.id);
    row.querySelector("button").setAttribute("aria-pressed", String(row.dataset.key === chosen?.id));
  }
  if (chosen) showTimeline();
  else forgetTimeline();
}

async function showTimeline() {
  if (isAsking) return;
  isAsking = true;
  const asked = chosen;
  try {
    const answer = await read(`/api/requests/${encodeURIComponent(asked.id)}`);
    if (asked === chosen) drawChosen(answer);
  } catch (error) {
    if (asked === chosen) forgetTimeline(element("p", { class: "hint" }, `No timeline of ${asked.id}: ${wordsOf(error)}`));
  } finally {
    isAsking = false;
  }
  // Another one was chosen meanwhile.
  if (chosen && asked !== chosen) showTimeline();
}

function drawChosen({ request, spans }) {
  chosen.isOver = !RUNNING_PHASES.has(request.phase);
  const place = byId("timeline");
  if (place.dataset.of !== request.id) makeTimeline(place, request.id);
  const [, facts, picture, table] = place.children;
  setText(facts, factsOf(request));
  picture.replaceChildren(drawTimeline(spans, request.age_s, Math.max(place.clientWidth, 280)));
  table.lastChild.replaceChildren(timelineTable(spans));
}

function makeTimeline(place, id) {
  place.dataset.of = id;
  place.replaceChildren(element("h3", {}, "Timeline of ", element("span", { class: "id" }, id)), element("p", { class: "hint" }), element("div"),
    element("details", {}, element("summary", {}, "As a table"), element("div", { class: "scroller" })));
}

function forgetTimeline(...words) {
  delete byId("timeline").dataset.of;
  byId("timeline").replaceChildren(...words);
}

function factsOf(request) {
  const facts = [request.phase, `TTFT ${seconds(request.ttft_s)}`, `TPOT ${seconds(request.tpot_s)}`, plural(request.output_tokens, "output token")];
  if (request.attempt) facts.push(`continued ${request.attempt === 1 ? "once" : `${request.attempt} times`}`);
  return facts.join(" · ");
}
