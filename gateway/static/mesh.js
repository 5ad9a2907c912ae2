// What /api/mesh tells, in the words of the picture and of the control panel.

import { count, NONE, plural, rate, seconds, share } from "./format.js";

// In the order of a request's walk; those of one column stand below each other.
const POOLS = [
  ["scheduler", "Schedulers", 0], ["predictor", "Length predictors", 0], ["gateway", "Gateways", 0],
  ["prefill", "Prefill", 1], ["mixed", "Mixed", 1], ["decode", "Decode", 2], ["attention", "Attention", 3],
];
const SCALED = ["gateway", "scheduler", "prefill", "decode", "mixed", "attention", "predictor"];
const INDISPENSABLE = ["gateway", "scheduler", "attention"]; // As long as there is one.
const PHASES = ["prefill", "decode"];
const FIXED = ["attention", "predictor"]; // A mesh that was started without them cannot have them later.
const MOST_IDLE_LINKS = 24; // Beyond that the lines of hand-overs that could be hide those that are.

// {pools: [{name, title, column, hasKV, nodes}], links: [{source, target, bytesPerS}]}; without pools that
// nobody is in.
export function scene(mesh) {
  const services = mesh.services.map((each) => serviceNode(mesh, each));
  const nodes = [...services, ...mesh.instances.map(instanceNode)];
  const pools = POOLS.map(([name, title, column]) => {
    const own = nodes.filter((node) => node.pool === name);
    return { name, title, column, nodes: own, hasKV: own.some((node) => node.kv !== null) };
  });
  return { pools: pools.filter((pool) => pool.nodes.length), links: linksOf(mesh) };
}

function serviceNode(mesh, service) {
  const isLeader = service.id === mesh.leader?.id;
  const line = {
    scheduler: isLeader ? `epoch ${mesh.leader.epoch}` : "stands by",
    gateway: service.id === mesh.gateway ? "serves this page" : "",
    attention: service.kv_total_tokens ? `holds ${count(service.running)}` : "",
  }[service.kind];
  const isReady = service.state === "ready";
  const note = isReady ? (isLeader ? "leads" : "") : service.state;
  const kv = kvShare(service);
  const description = inWords(service.id, service.kind, note, line, kvInWords(kv));
  return { id: service.id, pool: service.kind, isReady, note, line: line || service.host, kv, description };
}

const kvInWords = (kv) => (kv === null ? "" : `${share(kv)} of its KV in use`);

function instanceNode(instance) {
  const kv = kvShare(instance);
  const isReady = instance.state === "ready";
  const away = instance.home === instance.role ? "" : `from ${instance.home}`;
  const note = isReady ? away : instance.state;
  const line = lineOf(instance);
  const description = inWords(instance.id, instance.role, note, line, kvInWords(kv));
  return { id: instance.id, pool: instance.role, isReady, note, line, kv, description };
}

const inWords = (id, ...words) => `${id}: ${words.filter(Boolean).join(", ")}`;

const kvShare = ({ kv_used_tokens: used, kv_total_tokens: total }) => (total ? used / total : null);

// Prompt tokens not yet computed, sequences that run and that wait.
function lineOf(instance) {
  const parts = [];
  if (instance.queue_tokens) parts.push(`${count(instance.queue_tokens)} tok`);
  if (instance.running) parts.push(`${count(instance.running)} run`);
  if (instance.waiting) parts.push(`${count(instance.waiting)} wait`);
  return parts.join(" · ") || "idle";
}

// Over which bytes go, and thin ones for the hand-overs that could be.
function linksOf(mesh) {
  const links = mesh.links.map((link) => (
    { source: link.source, target: link.target, bytesPerS: link.bytes_per_s }));
  const known = new Set(links.map((link) => `${link.source} ${link.target}`));
  const idsWhere = (isOne) => mesh.instances.filter(isOne).map((each) => each.id);
  const targets = idsWhere((each) => each.role === "decode");
  const all = idsWhere((each) => each.role !== "decode").flatMap((source) =>
    targets.map((target) => ({ source, target, bytesPerS: 0 })));
  const idle = all.filter(({ source, target }) => !known.has(`${source} ${target}`));
  return idle.length > MOST_IDLE_LINKS ? links : [...idle, ...links];
}

export function summaryOf(mesh) {
  const running = mesh.instances.reduce((sum, each) => sum + each.running, 0);
  return [
    mesh.model,
    plural(mesh.instances.length, "instance"),
    `${count(running)} in decode steps`,
    mesh.is_bus_connected ? "" : "NATS does not answer: loads are old",
    mesh.is_store_answering ? "" : "Redis does not answer: members are old",
  ].filter(Boolean).join(" · ");
}

// [{role, current, least, desired, reason}] of what can be scaled; `desired` null: nothing is planned for it.
export function servicesOf(mesh) {
  const there = [...mesh.instances.map((each) => each.home), ...mesh.services.map((each) => each.kind)];
  const services = SCALED.map((role) => {
    const plan = mesh.plan?.counts.find((each) => each.service === role);
    const current = there.filter((each) => each === role).length;
    const least = leastOf(mesh, role);
    return { role, current, least, desired: plan?.desired ?? null, reason: plan?.reason ?? "" };
  });
  return services.filter((each) => each.current > 0 || !FIXED.includes(each.role));
}

// Fewer are refused: nobody would take requests, place them, or do a phase that somebody does.
function leastOf(mesh, role) {
  if (INDISPENSABLE.includes(role)) return 1;
  const left = mesh.instances.filter((each) => each.home !== role);
  const isDone = (phase, those) => those.some((each) => [phase, "mixed"].includes(each.role));
  return PHASES.some((phase) => isDone(phase, mesh.instances) && !isDone(phase, left)) ? 1 : 0;
}

// What is known of one that was chosen in the picture; null: it is gone.
export function instanceOf(mesh, id) {
  const instance = mesh.instances.find((each) => each.id === id);
  if (instance) return { id, pool: instance.role, isInstance: true, facts: factsOf(instance) };
  const service = mesh.services.find((each) => each.id === id);
  if (!service) return null;
  const facts = [["Service", service.kind], ["State", service.state]];
  if (service.kind === "attention") {
    facts.push(["Holds", `the KV of ${plural(service.running, "sequence")}`], ["KV", kvFacts(service)]);
  }
  facts.push(["Where", `${service.host}, process ${service.pid}`]);
  return { id, pool: service.kind, isInstance: false, servesPage: id === mesh.gateway, facts };
}

function kvFacts(one) {
  const kv = kvShare(one);
  if (kv === null) return NONE;
  return `${count(one.kv_used_tokens)} of ${count(one.kv_total_tokens)} tokens, ${share(kv)}`;
}

function factsOf(instance) {
  const measured = (value, words) => (value === null ? "not measured yet" : words(value));
  return [
    ["Role", instance.home === instance.role ? instance.role : `${instance.role}, at home ${instance.home}`],
    ["State", instance.state],
    ["Queue", `${plural(instance.queue_tokens, "prompt token")}, ${count(instance.waiting)} waiting`],
    ["Running", plural(instance.running, "sequence")],
    ["KV", kvFacts(instance)],
    ["Prefill", measured(instance.prefill_tokens_per_s, (value) => `${rate(value)} prompt tokens/s`)],
    ["Decode step", measured(instance.decode_step_s, seconds)],
    ["Where", `${instance.host}, process ${instance.pid}, ${instance.device}`],
  ];
}
