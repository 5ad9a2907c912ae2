// The gateway's events, and whether they still come. EventSource tries again by itself only after some
// failures, and says nothing of a connection that stands still: both are ours here.

const SILENCE_S = 5; // The gateway speaks once a second.
const RETRY_S = [0.5, 1, 2, 4];

// `on`: event name → what takes its JSON. `onState(state, silentForS)`: "connecting", "live" or "lost"; of
// the last one told again every second. Returns what goes on with another URL's events.
export function openStream(url, on, onState) {
  let source = null;
  let state = "connecting";
  let heardAt = performance.now();
  let openedAt = heardAt;
  let failures = 0;
  let retry = null;

  const silentForS = () => (performance.now() - heardAt) / 1000;

  function become(next) {
    state = next;
    onState(state, silentForS());
  }

  function connect() {
    clearTimeout(retry);
    retry = null;
    if (source) source.close();
    openedAt = performance.now();
    source = new EventSource(url);
    for (const [name, take] of Object.entries(on)) {
      source.addEventListener(name, (event) => {
        heard();
        take(JSON.parse(event.data));
      });
    }
    source.onerror = lose;
  }

  function heard() {
    heardAt = performance.now();
    failures = 0;
    if (state !== "live") become("live");
  }

  function lose() {
    source.close();
    if (retry === null) {
      retry = setTimeout(connect, RETRY_S[Math.min(failures, RETRY_S.length - 1)] * 1000);
      failures += 1;
    }
    become("lost");
  }

  function look() {
    const openForS = (performance.now() - openedAt) / 1000;
    if (retry === null && silentForS() > SILENCE_S && openForS > SILENCE_S) lose();
    else if (state === "lost") onState(state, silentForS());
  }

  function follow(next) {
    url = next;
    // Who waits to try again will; else the state stays until the new connection says a word, or fails to.
    if (retry === null) connect();
  }

  connect();
  onState(state, 0);
  setInterval(look, 1000);
  // A laptop that wakes up, a network that is back: no need to wait for the next try.
  addEventListener("online", connect);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && state === "lost") connect();
  });
  return follow;
}
