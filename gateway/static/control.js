// The operator's hands: how many of each service, which role an instance has, and who leaves.

import { adminKey, wish, wordsOf } from "./api.js";
import { byId, element, keep, setAttributes, setText } from "./dom.js";
import { countsAsked, nameOf } from "./wishes.js";

const WISH_TIMEOUT_MS = 60000; // An instance may have to load its model before it counts.
const FLIPPED = ["prefill", "decode", "mixed"];
const ENDS = {
  gateway: "It takes nothing new. Answers that are not finished when its time to drain is over are cut off.",
  scheduler: "What it has placed stays placed; what waits for it is placed by another.",
  predictor: "What it was asked is answered first.",
};
const MOVES = "What runs there is finished or moved first."; // Instances and attention workers.

let rows = new Map();
let wished = [];
let asked = {};
let accepted = null; // {what, known}: the newest that was, and what was wished before.
const sent = new Map(); // By role: the count that was asked for last, and the newest wish known then.

// `wishes`: what the gateway takes from who has the admin key; only for that there are buttons. `services`:
// [{role, current, least, desired, reason}] as `servicesOf` makes them (mesh.js); `told`: what is wished, as
// /api/mesh tells it.
export function showScale(services, wishes, told) {
  rows = new Map(services.map((each) => [each.role, each]));
  wished = told;
  asked = countsAsked(wished);
  for (const [role, each] of sent) {
    const newest = asked[role];
    if (newest && newest.id !== each.after && newest.count === each.count) sent.delete(role);
  }
  const nobody = "the gateway was given no admin key: nobody may change anything";
  const key = adminKey() ? "with the admin key of this tab" : "needs the admin key";
  setText(byId("control-hint"), wishes.length ? key : nobody);
  forgetAccepted();
  byId("key-button").hidden = !wishes.length;
  const update = (row, service) => updateRow(row, service, wishes.includes("scale"));
  keep(byId("scale"), services, (each) => each.role, newRow, update);
}

// Below stands what comes of it.
function forgetAccepted() {
  const isMine = (each) => nameOf(each.wish) === accepted.what && !accepted.known.has(each.id);
  if (accepted && wished.some(isMine)) answer("", "");
}

// How many there are to be once what was asked for has come about; null: nothing is open.
function openCount(role) {
  if (sent.has(role)) return sent.get(role).count;
  return asked[role]?.isOpen ? asked[role].count : null;
}

function newButton(label, onclick, text) {
  return element("button", { type: "button", "aria-label": label, onclick }, text);
}

function newRow({ role }) {
  const fewer = newButton(`One ${role} fewer`, () => scale(role, -1), "−");
  const more = newButton(`One ${role} more`, () => scale(role, 1), "+");
  const name = element("span", { class: "name" }, role);
  const parts = [name, fewer, element("output"), more, element("span", { class: "hint" })];
  return element("div", { class: `scale-row ${role}` }, ...parts);
}

function updateRow(row, service, canScale) {
  const [, fewer, current, more, hint] = row.children;
  const open = openCount(service.role);
  fewer.hidden = more.hidden = !canScale;
  const count = open ?? service.current;
  fewer.disabled = count <= service.least;
  const stays = "The last one stays: no request would be served.";
  setAttributes(fewer, { title: count > 0 && fewer.disabled ? stays : null });
  setText(current, String(service.current));
  const isWanted = service.desired !== null && service.desired !== service.current;
  const words = [
    open !== null && open !== service.current ? `${open} asked for` : "",
    isWanted ? `the scheduler wants ${service.desired}: ${service.reason}` : "",
  ].filter(Boolean).join("; ");
  setText(hint, words);
  hint.hidden = !words;
}

// From what was asked for last: who presses twice wants two, however long the first takes to come.
async function scale(role, change) {
  const surely = `End one ${role}? ${ENDS[role] ?? MOVES}`;
  if (change < 0 && !(await isSure(surely, "End one"))) return;
  const count = Math.max((openCount(role) ?? rows.get(role).current) + change, 0);
  const mine = { count, after: asked[role]?.id };
  sent.set(role, mine);
  const isTaken = await tell(`${role} → ${count}`, "/api/scale", { role, count });
  if (!isTaken && sent.get(role) === mine) sent.delete(role);
}

// `instance`: {id, pool, facts: [[name, words]], isInstance, servesPage}, or null: none is chosen. Only
// instances have a role to change.
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
  const facts = instance.facts.flatMap(([name, words]) => [["dt", name, name], ["dd", name, words]]);
  keep(place.querySelector("dl"), facts, ([tag, name]) => `${tag} ${name}`,
    ([tag]) => element(tag), (node, [, , words]) => setText(node, words));
}

function makeInstance(place, instance, wishes) {
  const title = element("h3", {}, element("span", { class: "id" }, instance.id));
  const hands = [];
  if (instance.isInstance && wishes.includes("flip")) hands.push(...flipOf(instance));
  if (wishes.includes("drain")) hands.push(...drainOf(instance));
  place.replaceChildren(title, element("dl", { class: "facts" }), element("div", { class: "row" }, ...hands));
}

function flipOf({ id, pool }) {
  const others = FLIPPED.filter((each) => each !== pool).map((each) => element("option", {}, each));
  const role = element("select", {}, ...others);
  const flip = () => tell(`${id} → ${role.value}`, "/api/flip", { instance: id, role: role.value });
  return [element("label", {}, "to ", role), element("button", { type: "button", onclick: flip }, "Flip")];
}

function drainOf(instance) {
  const onclick = () => askDrain(instance);
  const drain = element("button", { type: "button", class: "danger", onclick }, "Drain");
  return [element("span", { class: "push" }), drain];
}

async function askDrain({ id, pool, servesPage }) {
  const here = servesPage ? " It serves this page." : "";
  const ends = `${ENDS[pool] ?? MOVES} It does not come back by itself.`;
  if (await isSure(`Drain ${id}? ${ends}${here}`, "Drain")) {
    await tell(`draining ${id}`, "/api/drain", { instance: id });
  }
}

// Asks, and says what was answered. Whether it was taken up.
async function tell(what, path, body) {
  answer("", `${what} …`);
  const known = new Set(wished.map((each) => each.id));
  try {
    const said = await wish(path, body, WISH_TIMEOUT_MS);
    if (said === null) answer("", "");
    else answer("good", said.message ?? `${what}: accepted`);
    if (said !== null) accepted = { what, known };
    return said !== null;
  } catch (error) {
    answer("bad", `${what}: ${wordsOf(error)}`);
    return false;
  }
}

function answer(kind, words) {
  accepted = null;
  byId("control-answer").dataset.kind = kind;
  setText(byId("control-answer"), words);
}

function isSure(words, yes) {
  const dialog = byId("sure-dialog");
  setText(byId("sure-text"), words);
  setText(byId("sure-yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
