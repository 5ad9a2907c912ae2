// Puts the parts together: what the gateway's events say is shown where it belongs.

import { read, startKey } from "./api.js";
import { startChat } from "./chat.js";
import { showInstance, showScale } from "./control.js";
import { showDecisions } from "./decisions.js";
import { byId, setText } from "./dom.js";
import { seconds } from "./format.js";
import { showLatency, startLatency } from "./latency.js";
import { instanceOf, scene, servicesOf, summaryOf } from "./mesh.js";
import { Picture } from "./picture.js";
import { showRequests } from "./requests.js";
import { openStream } from "./stream.js";

const DECISIONS_EVERY_MS = 2000;

let mesh = null;
let chosen = null;
let isLive = false;

// Who is chosen in the picture is shown in the control panel.
const picture = new Picture(byId("picture"), (id) => {
  chosen = chosen === id ? null : id;
  showMesh(mesh);
});

function showMesh(told) {
  mesh = told;
  setText(byId("mesh-summary"), summaryOf(mesh));
  picture.show(scene(mesh), chosen);
  showScale(servicesOf(mesh), mesh.wishes);
  showInstance(chosen === null ? null : instanceOf(mesh, chosen), mesh.wishes);
}

function showState(state, silentForS) {
  const wasLive = isLive;
  isLive = state === "live";
  if (isLive && !wasLive) askDecisions();
  document.documentElement.dataset.stream = state;
  setText(byId("connection-text"), { connecting: "connecting", live: "live", lost: "reconnecting" }[state]);
  const stale = byId("stale");
  stale.hidden = state !== "lost";
  // Set once an outage: a screen reader is not told every second.
  if (state === "lost" && stale.dataset.said !== "yes") {
    setText(stale, mesh ? "No word from the gateway: what is shown is old. Trying again." : "The gateway cannot be reached. Trying again.");
  }
  stale.dataset.said = state === "lost" ? "yes" : "no";
  byId("connection").title = state === "lost" ? `last word ${seconds(silentForS)} ago` : "";
}

async function askDecisions() {
  if (!isLive || document.hidden) return;
  try {
    showDecisions(await read("/api/decisions"));
  } catch {
    // The event stream says when the gateway is away; what is shown stays.
  }
}

startKey();
startChat();
startLatency();
openStream("/api/events", { mesh: showMesh, latency: showLatency, requests: showRequests }, showState);
setInterval(askDecisions, DECISIONS_EVERY_MS);
