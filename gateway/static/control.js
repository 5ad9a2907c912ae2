// The operator's hands: how many of each service, which role an instance has, and who leaves.

import { wish, wordsOf } from "./api.js";
import { byId, element, keep, setText } from "./dom.js";

const WISH_TIMEOUT_MS = 60000; // An instance may have to load its model before it counts.
const FLIPPED = ["prefill", "decode", "mixed"];

let rows = new Map();

// `wishes`: what the gateway takes from who has the admin key; only for that there are buttons. `services`:
// [{role, current, desired, reason}] as `servicesOf` makes them (mesh.js).
export function showScale(services, wishes) {
  rows = new Map(services.map((each) => [each.role, each]));
  setText(byId("control-hint"), wishes.length ? "needs the admin key" : "the gateway was given no admin key: nobody may change anything");
  byId("key-button").hidden = !wishes.length;
  keep(byId("scale"), services, (each) => each.role, newRow, (row, service) => updateRow(row, service, wishes.includes("scale")));
}

function newRow({ role }) {
  const fewer = element("button", { type: "button", "aria-label": `One ${role} fewer`, onclick: () => scale(role, -1) }, "−");
  const more = element("button", { type: "button", "aria-label": `One ${role} more`, onclick: () => scale(role, 1) }, "+");
  return element("div", { class: `scale-row ${role}` }, element("span", { class: "name" }, role), fewer, element("output"), more, element("span", { class: "hint" }));
}

function updateRow(row, service, canScale) {
  const [, fewer, current, more, hint] = row.children;
  fewer.hidden = more.hidden = !canScale;
  fewer.disabled = service.current === 0;
  setText(current, String(service.current));
  const isWanted = service.desired !== null && service.desired !== service.current;
  setText(hint, isWanted ? `the scheduler wants ${service.desired}: ${service.reason}` : "");
  hint.hidden = !isWanted;
}

async function scale(role, change) {
  const count = Math.max(rows.get(role).current + change, 0);
  if (change < 0 && !(await isSure(`End one ${role}? What runs there is finished or moved first.`, "End one"))) return;
  await tell(`${role} → ${count}`, "/api/scale", { role, count });
}

// `instance`: {id, pool, facts: [[name, words]], isInstance}, or null: none is chosen. Others than instances are only shown.
export function showInstance(instance, wishes) {
  const place = byId("instance");
  if (!instance) {
    place.replaceChildren();
    delete place.dataset.of;
    return;
  }
  const of = [instance.id, instance.pool, ...wishes].join(" ");
  if (place.dataset.of !== of) makeInstance(place, instance, wishes);
  place.dataset.of = of;
  const facts = place.querySelector("dl");
  keep(facts, instance.facts.flatMap(([name, words]) => [["dt", name, name], ["dd", name, words]]), ([tag, name]) => `${tag} ${name}`,
    ([tag]) => element(tag), (node, [, , words]) => setText(node, words));
}

function makeInstance(place, { id, pool, isInstance }, wishes) {
  place.replaceChildren(element("h3", {}, element("span", { class: "id" }, id)), element("dl", { class: "facts" }));
  if (!isInstance) return;
  const role = element("select", {}, ...FLIPPED.filter((each) => each !== pool).map((each) => element("option", {}, each)));
  const flip = element("button", { type: "button", onclick: () => tell(`${id} → ${role.value}`, "/api/flip", { instance: id, role: role.value }) }, "Flip");
  const drain = element("button", { type: "button", class: "danger", onclick: () => askDrain(id) }, "Drain");
  const hands = { flip: [element("label", {}, "to ", role), flip], drain: [element("span", { class: "push" }), drain] };
  place.append(element("div", { class: "row" }, ...["flip", "drain"].filter((each) => wishes.includes(each)).flatMap((each) => hands[each])));
}

async function askDrain(id) {
  if (await isSure(`Drain ${id}? It takes nothing new, finishes what it has, ends, and does not come back by itself.`, "Drain")) {
    await tell(`draining ${id}`, "/api/drain", { instance: id });
  }
}

// Asks, and says what became of it.
async function tell(what, path, body) {
  answer("", `${what} …`);
  try {
    const said = await wish(path, body, WISH_TIMEOUT_MS);
    if (said === null) answer("", "");
    else answer("good", said.message ?? `${what}: accepted`);
  } catch (error) {
    answer("bad", `${what}: ${wordsOf(error)}`);
  }
}

function answer(kind, words) {
  byId("control-answer").dataset.kind = kind;
  setText(byId("control-answer"), words);
}

function isSure(words, yes) {
  const dialog = byId("sure-dialog");
  setText(byId("sure-text"), words);
  setText(byId("sure-yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}
