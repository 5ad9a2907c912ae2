// Where the newest requests were placed, who else was looked at, and what spoke against them.

import { byId, element, keep, setText } from "./dom.js";
import { count, NONE, seconds, shortId } from "./format.js";

const MEASURED = { prefill: ["TTFT", "ttft_s"], decode: ["TPOT", "tpot_s"] };

// `decisions`: the newest first, as /api/decisions tells them. An entry stays open while it is shown.
export function showDecisions(decisions) {
  byId("decisions-none").hidden = decisions.length > 0;
  keep(byId("decision-list"), decisions, (each) => `${each.request_id} ${each.attempt}`, newEntry, updateEntry);
}

function newEntry() {
  const summary = element("summary", {}, element("span", { class: "id" }), element("span", { class: "where" }), element("span", { class: "hint" }));
  return element("details", { class: "decision" }, summary, element("div", { class: "choices" }));
}

function updateEntry(entry, decision) {
  const said = JSON.stringify(decision);
  if (entry.said === said) return;
  entry.said = said;
  const [summary, choices] = entry.children;
  const [id, where, hint] = summary.children;
  setText(id, shortId(decision.request_id) + (decision.attempt ? `, attempt ${decision.attempt}` : ""));
  setText(where, decision.choices.map((choice) => choice.taken ?? "nobody").join(" → ") || NONE);
  setText(hint, factsOf(decision));
  choices.replaceChildren(...decision.choices.map((choice) => tableOf(choice, decision)));
}

function factsOf(decision) {
  const drawn = decision.output_tokens === null ? "not over yet" : `${count(decision.output_tokens)} drawn`;
  const why = decision.choices.find((choice) => choice.reason)?.reason;
  const facts = [decision.service_class, `${count(decision.prompt_tokens)} prompt tokens`, `${count(decision.predicted_tokens)} predicted, ${drawn}`];
  return [...facts, why].filter(Boolean).join(" · ");
}

function tableOf(choice, decision) {
  const [name, field] = MEASURED[choice.phase];
  const told = [`${choice.phase}: ${choice.policy.replaceAll("_", " ")}`];
  if (choice.predicted_s !== null) told.push(`${name} predicted ${seconds(choice.predicted_s)}`);
  if (decision[field] !== null) told.push(`measured ${seconds(decision[field])}`);
  const order = (each) => [each.refusal ? 1 : 0, each.score];
  const candidates = [...choice.candidates].sort((one, other) => order(one)[0] - order(other)[0] || order(one)[1] - order(other)[1]);
  const rows = candidates.map((each) => {
    const isTaken = each.instance_id === choice.taken;
    const words = [isTaken ? "taken" : null, each.refusal ?? each.note].filter(Boolean).join(", ");
    return element("tr", { class: isTaken ? "why taken" : "why" }, element("td", { class: "id" }, each.instance_id),
      element("td", { class: "number" }, scoreOf(each.score)), element("td", {}, words));
  });
  const heads = element("tr", {}, element("th", { scope: "col" }, "Instance"), element("th", { scope: "col", class: "number" }, "Score"), element("th", { scope: "col" }, "Why"));
  const reason = choice.reason ? element("p", { class: "hint" }, choice.reason) : null;
  return element("div", {}, element("h3", {}, told.join(", ")), reason, element("table", {}, element("thead", {}, heads), element("tbody", {}, ...rows)));
}

const scoreOf = (score) => (Number.isInteger(score) ? count(score) : Number(score.toPrecision(4)).toString());
