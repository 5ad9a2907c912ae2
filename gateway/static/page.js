// Puts the parts together: what the gateway's events say is shown where it belongs.

import { startKey } from "./api.js";
import { startChat } from "./chat.js";
import { showInstance, showScale } from "./control.js";
import { showDecisions } from "./decisions.js";
import { byId, setText } from "./dom.js";
import { seconds } from "./format.js";
import { showLatency, startLatency } from "./latency.js";
import { instanceOf, scene, servicesOf, summaryOf } from "./mesh.js";
import { Picture } from "./picture.js";
import { showRequests, showTimeline, startRequests } from "./requests.js";
import { openStream } from "./stream.js";
import { showWished } from "./wishes.js";

const ONE_COLUMN = matchMedia("(max-width: 960px)"); // As in ground.css.

let mesh = null;
let chosen = null;

// Who is chosen in the picture is shown in the control panel: far below, where there is one column only.
const picture = new Picture(byId("picture"), (id) => {
  chosen = chosen === id ? null : id;
  showMesh(mesh);
  if (chosen !== null && ONE_COLUMN.matches) byId("instance").scrollIntoView();
});

function showMesh(told) {
  mesh = told;
  setText(byId("mesh-summary"), summaryOf(mesh));
  picture.show(scene(mesh), chosen);
  showScale(servicesOf(mesh), mesh.wishes, mesh.wished);
  showWished(mesh.wished);
  showInstance(chosen === null ? null : instanceOf(mesh, chosen), mesh.wishes);
}

function showState(state, silentForS) {
  document.documentElement.dataset.stream = state;
  setText(byId("connection-text"), { connecting: "connecting", live: "live", lost: "reconnecting" }[state]);
  const stale = byId("stale");
  stale.hidden = state !== "lost";
  // Set once an outage: a screen reader is not told every second.
  if (state === "lost" && stale.dataset.said !== "yes") {
    const why = mesh ? "No word from the gateway: what is shown is old." : "The gateway cannot be reached.";
    setText(stale, `${why} Trying again.`);
  }
  stale.dataset.said = state === "lost" ? "yes" : "no";
  byId("connection").title = state === "lost" ? `last word ${seconds(silentForS)} ago` : "";
}

startKey();
startChat();
startLatency();
const EVENTS = "/api/events";
const follow = openStream(EVENTS, {
  mesh: showMesh,
  latency: showLatency,
  requests: showRequests,
  decisions: showDecisions,
  timeline: showTimeline,
}, showState);
// The stream tells the timeline of the request that is chosen, too.
startRequests((id) => follow(id === null ? EVENTS : `${EVENTS}?request=${encodeURIComponent(id)}`));
