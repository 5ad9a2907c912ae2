// Where the newest requests were placed, who else was looked at, and what spoke against them.

import { byId, element, keep, setText } from "./dom.js";
import { count, NONE, seconds, shortId } from "./format.js";

const MEASURED = { prefill: ["TTFT", "ttft_s"], decode: ["TPOT", "tpot_s"] };

// `decisions`: the newest first, as /api/decisions tells them. An entry stays open while it is shown.
export function showDecisions(decisions) {
  byId("decisions-none").hidden = decisions.length > 0;
  const keyOf = (each) => `${each.request_id} ${each.attempt}`;
  keep(byId("decision-list"), decisions, keyOf, newEntry, updateEntry);
}

function newEntry() {
  const parts = ["id", "where", "hint"].map((each) => element("span", { class: each }));
  const choices = element("div", { class: "choices" });
  return element("details", { class: "decision" }, element("summary", {}, ...parts), choices);
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
  const why = decision.choices.find((choice) => choice.reason)?.reason;
  const prompt = `${count(decision.prompt_tokens)} prompt tokens`;
  const output = `${count(decision.predicted_tokens)} predicted, ${outcomeOf(decision)}`;
  return [decision.service_class, prompt, output, why].filter(Boolean).join(" · ");
}

function outcomeOf(decision) {
  if (decision.output_tokens !== null) return `${count(decision.output_tokens)} drawn`;
  return decision.is_over ? "left or broken off" : "not over yet";
}

function tableOf(choice, decision) {
  const [name, field] = MEASURED[choice.phase];
  const told = [`${choice.phase}: ${choice.policy.replaceAll("_", " ")}`];
  if (choice.predicted_s !== null) told.push(`${name} predicted ${seconds(choice.predicted_s)}`);
  if (decision[field] !== null) told.push(`measured ${seconds(decision[field])}`);
  const isRefused = (each) => (each.refusal ? 1 : 0);
  const byScore = (one, other) => isRefused(one) - isRefused(other) || one.score - other.score;
  const rows = [...choice.candidates].sort(byScore).map((each) => {
    const isTaken = each.instance_id === choice.taken;
    const words = [isTaken ? "taken" : null, each.refusal ?? each.note].filter(Boolean).join(", ");
    return element("tr", { class: isTaken ? "why taken" : "why" },
      element("td", { class: "id" }, each.instance_id),
      element("td", { class: "number" }, scoreOf(each.score)),
      element("td", {}, words));
  });
  const heads = [["Instance"], ["Score", "number"], ["Why"]].map(([word, kind]) =>
    element("th", { scope: "col", class: kind }, word));
  const table = element("table", {},
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
  const reason = choice.reason ? element("p", { class: "hint" }, choice.reason) : null;
  return element("div", {}, element("h3", {}, told.join(", ")), reason, table);
}

const scoreOf = (score) => (Number.isInteger(score) ? count(score) : Number(score.toPrecision(4)).toString());
