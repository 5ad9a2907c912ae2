// The mesh as a picture: a box for whoever runs, a line for whoever sends KV or activations to whom.

import { drawn, keep, setAttributes, setText } from "./dom.js";
import { bytes, share, shortId } from "./format.js";
import { layOut } from "./layout.js";

const KV_HEIGHT = 5;
const MOST_WORDS = 12; // Of links: the busiest, where there are more.

// `onChoose(id)`: somebody wants to know more of that one.
export class Picture {
  #root = drawn("svg", { role: "group", "aria-label": "The mesh" });
  #links = drawn("g", { class: "links" });
  #titles = drawn("g", { class: "titles" });
  #boxes = drawn("g", { class: "boxes" });
  #words = drawn("g", { class: "link-words", "aria-hidden": "true" });
  #onChoose;
  #shown = null;
  #chosen = null;

  constructor(parent, onChoose) {
    this.#onChoose = onChoose;
    this.#root.append(this.#links, this.#titles, this.#boxes, this.#words);
    parent.append(this.#root);
    new ResizeObserver(() => this.#shown && this.#draw()).observe(parent);
  }

  // `pools` and `links` as `scene` makes them (mesh.js).
  show(scene, chosen) {
    this.#shown = scene;
    this.#chosen = chosen;
    this.#draw();
  }

  #draw() {
    const { pools, links } = this.#shown;
    const width = Math.max(this.#root.parentElement.clientWidth, 280);
    const plan = layOut(pools, links, width);
    const { width: planned, height } = plan;
    setAttributes(this.#root, { viewBox: `0 0 ${planned} ${height}`, width: planned, height });
    keep(this.#titles, plan.titles, (each) => each.name, () => drawn("text"), (node, each) => {
      setAttributes(node, { x: each.x, y: each.y });
      setText(node, each.title);
    });
    const most = Math.max(...links.map((link) => link.bytesPerS), 1);
    const nameOf = (each) => `${each.link.source} ${each.link.target}`;
    keep(this.#links, plan.curves, nameOf, () => drawn("path", {}, drawn("title")), (node, each) => {
      const flow = each.link.bytesPerS / most;
      const isAside = !this.#concerns(each.link);
      setAttributes(node, {
        d: each.path,
        class: `${flow > 0 ? "flows" : ""}${isAside ? " aside" : ""}`,
        "stroke-width": flow > 0 ? 1.5 + 4.5 * Math.sqrt(flow) : 1,
      });
      setText(node.firstChild, `${each.link.source} → ${each.link.target}: ${bytes(each.link.bytesPerS)}/s`);
    });
    const flowing = plan.curves.filter((each) => each.link.bytesPerS > 0 && this.#concerns(each.link))
      .sort((one, other) => other.link.bytesPerS - one.link.bytesPerS).slice(0, MOST_WORDS);
    keep(this.#words, apart(flowing), nameOf, () => drawn("text"), (node, each) => {
      setAttributes(node, { x: each.x, y: each.y + 4 });
      setText(node, `${bytes(each.link.bytesPerS)}/s`);
    });
    const nodes = pools.flatMap((pool) => pool.nodes.map((node) => ({ ...node, pool: pool.name })));
    keep(this.#boxes, nodes, (each) => each.id, (each) => this.#newBox(each), (node, each) =>
      this.#drawBox(node, each, plan.boxes.get(each.id)));
  }

  // Whether the link is that of the one that was chosen, or none that has links was.
  #concerns(link) {
    const isOf = (each) => each.source === this.#chosen || each.target === this.#chosen;
    return isOf(link) || !this.#shown.links.some((each) => each.bytesPerS > 0 && isOf(each));
  }

  #newBox({ id }) {
    const choose = () => this.#onChoose(id);
    const box = drawn("g", { role: "button", tabindex: 0, onclick: choose },
      drawn("title"),
      drawn("rect", { class: "ground", rx: 6 }),
      drawn("rect", { class: "stripe", rx: 1.5 }),
      drawn("text", { class: "name" }),
      drawn("text", { class: "note" }),
      drawn("text", { class: "line" }),
      drawn("rect", { class: "kv-ground", rx: 2 }),
      drawn("rect", { class: "kv", rx: 2 }),
      drawn("text", { class: "kv-words" }));
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        choose();
      }
    });
    return box;
  }

  #drawBox(box, node, place) {
    const [title, ground, stripe, name, note, line, kvGround, kv, kvWords] = box.children;
    const { width, height } = place;
    const isTall = height >= 58;
    const hasLine = height >= 40;
    const hasKV = node.kv !== null;
    setAttributes(box, {
      transform: `translate(${place.x} ${place.y})`,
      class: `box ${node.pool}${node.id === this.#chosen ? " chosen" : ""}${node.isReady ? "" : " unready"}`,
      "aria-label": node.description,
      "aria-pressed": String(node.id === this.#chosen),
    });
    setText(title, node.description);
    setAttributes(ground, { width, height });
    setAttributes(stripe, { x: 4, y: 5, width: 3, height: height - 10 });
    setAttributes(name, { x: 13, y: 16 });
    setText(name, shortId(node.id, Math.floor((width - 22 - node.note.length * 6.2) / 7.3)));
    setAttributes(note, { x: width - 7, y: 16 });
    setText(note, node.note);
    setAttributes(line, { x: 13, y: 32, visibility: hasLine ? null : "hidden" });
    setText(line, clip(node.line, (width - 20 - (isTall || !hasKV ? 0 : 32)) / 5.9));
    const room = width - (isTall ? 58 : 20);
    const y = isTall ? 42 : height - KV_HEIGHT - (hasLine ? 0.5 : 1);
    const bar = { x: 13, y, height: isTall ? 7 : 3 };
    const filled = hasKV ? Math.min(node.kv, 1) * room : 0;
    setAttributes(kvGround, { ...bar, width: room, visibility: hasKV ? null : "hidden" });
    setAttributes(kv, { ...bar, width: filled, class: node.kv > 0.9 ? "kv full" : "kv" });
    const visibility = hasKV && hasLine ? null : "hidden";
    setAttributes(kvWords, { x: width - 7, y: isTall ? 49 : 32, visibility });
    setText(kvWords, hasKV ? share(node.kv) : "");
  }
}

// Words that would lie on each other go above each other.
function apart(curves) {
  const placed = [];
  return [...curves].sort((one, other) => other.y - one.y).map((curve) => {
    let y = curve.y;
    while (placed.some((each) => Math.abs(each.x - curve.x) < 56 && Math.abs(each.y - y) < 13)) y -= 13;
    placed.push({ x: curve.x, y });
    return { ...curve, y };
  });
}

function clip(text, most) {
  return text.length <= most ? text : `${text.slice(0, Math.max(Math.floor(most) - 1, 1))}…`;
}
