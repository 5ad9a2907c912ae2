// A conversation with the model, through the API that everybody uses, streamed.

import { adminKey } from "./api.js";
import { byId, element } from "./dom.js";
import { rate, seconds } from "./format.js";

const turns = []; // What is sent again with every question: role and content.
let running = null;

export function startChat() {
  const form = byId("chat-form");
  const text = byId("chat-text");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running && text.value.trim()) ask(text.value.trim());
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  byId("chat-stop").addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", () => {
    running?.abort();
    turns.length = 0;
    byId("chat-turns").replaceChildren();
    byId("chat-speed").textContent = "";
  });
}

async function ask(question) {
  byId("chat-text").value = "";
  turns.push({ role: "user", content: question });
  show("You", question);
  const answer = show("Model", "");
  running = new AbortController();
  setBusy(true);
  try {
    const said = await stream(answer, running.signal);
    turns.push({ role: "assistant", content: said });
  } catch (error) {
    // What has no answer is not asked again with the next question.
    turns.pop();
    const isStopped = error.name === "AbortError";
    answer.parentElement.classList.toggle("bad", !isStopped);
    const reason = isStopped ? "stopped" : error.message || "the gateway cannot be reached";
    answer.append(` (${reason})`);
  } finally {
    running = null;
    setBusy(false);
  }
}

// Shows what comes as it comes; resolves with all of it.
async function stream(answer, signal) {
  const askedAt = performance.now();
  let firstAt = null;
  let chunks = 0;
  let said = "";
  for await (const event of events(await post(signal))) {
    if (event.error) throw new Error(event.error.message);
    const words = event.choices?.[0]?.delta?.content ?? "";
    if (words) {
      firstAt ??= performance.now();
      chunks += 1;
      said += words;
      append(answer, words);
    }
    const drawn = event.usage?.completion_tokens ?? chunks;
    if (firstAt !== null) tellSpeed(askedAt, firstAt, drawn);
  }
  return said;
}

async function post(signal) {
  // The private port takes the operator's key for a client's.
  const key = byId("chat-key").value.trim() || adminKey();
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) },
    body: JSON.stringify({
      model: "default",
      messages: turns,
      max_tokens: Number(byId("chat-tokens").value) || 128,
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new Error(answer?.error?.message ?? `${response.status} ${response.statusText}`);
}

// The JSON of every `data:` line. A stream that ends without [DONE] has broken off.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the stream broke off");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function show(who, words) {
  const said = element("span", {}, words);
  const log = byId("chat-turns");
  log.append(element("div", { class: "turn" }, element("strong", {}, who), said));
  log.scrollTop = log.scrollHeight;
  return said;
}

function append(answer, words) {
  const log = byId("chat-turns");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  answer.append(words);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function tellSpeed(askedAt, firstAt, drawn) {
  const tookS = (performance.now() - firstAt) / 1000;
  const speed = drawn > 1 && tookS > 0 ? `, ${rate((drawn - 1) / tookS)} output tokens/s` : "";
  byId("chat-speed").textContent = `first token after ${seconds((firstAt - askedAt) / 1000)}${speed}`;
}

// One of two buttons is there, with the focus that the other had.
function setBusy(isBusy) {
  const [send, stop] = [byId("chat-send"), byId("chat-stop")];
  const hadFocus = [send, stop].includes(document.activeElement);
  send.hidden = isBusy;
  stop.hidden = !isBusy;
  if (hadFocus) (isBusy ? stop : send).focus();
}
