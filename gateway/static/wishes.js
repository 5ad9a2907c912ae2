// What comes of operators' wishes: a count that is asked for, and why a wish has failed.

import { byId, element, keep, setText } from "./dom.js";
import { seconds } from "./format.js";

const KINDS = { done: "good", failed: "bad", under_way: "" };

// `wished`: as /api/mesh tells it, the newest first.
export function showWished(wished) {
  keep(byId("wished"), wished, (each) => each.id, () => element("li", { class: "answer" }), (node, each) => {
    node.dataset.kind = KINDS[each.state];
    setText(node, `${nameOf(each.wish)}: ${stateOf(each)}`);
  });
}

// As the control panel calls it while it asks (control.js).
export function nameOf(wish) {
  return wish.type === "scale-wish" ? `${wish.role} → ${wish.count}` : `draining ${wish.service_id}`;
}

function stateOf({ state, reason, since_s: sinceS }) {
  if (state === "under_way") return `under way for ${whole(sinceS)}`;
  return state === "done" ? `done ${whole(sinceS)} ago` : `failed ${whole(sinceS)} ago: ${reason}`;
}

const whole = (sinceS) => (sinceS < 99.5 ? `${Math.floor(sinceS)} s` : seconds(sinceS));

// The newest count that was asked for of each role, as far as it is known: {role: {id, count, isOpen}}.
export function countsAsked(wished) {
  const counts = {};
  for (const { id, state, wish } of [...wished].reverse()) {
    if (wish.type !== "scale-wish") continue;
    counts[wish.role] = { id, count: wish.count, isOpen: state === "under_way" };
  }
  return counts;
}
