// Asks the gateway, and tells it what the operator wants, behind the admin key.

import { byId } from "./dom.js";

const KEY = "lamella-admin-key";
const TIMEOUT_MS = 10000;

export class Refused extends Error {}

// Tells the gateway, asking for the key where it is not known. Null: the operator would rather not.
export async function wish(path, body, timeoutMs) {
  let said = "";
  for (;;) {
    const key = adminKey() || (await askKey(said));
    if (!key) return null;
    const response = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", authorization: `Bearer ${key}` },
      body: JSON.stringify(body),
      signal: AbortSignal.timeout(timeoutMs ?? TIMEOUT_MS),
    });
    if (response.status !== 401) return answerOf(response);
    forgetKey();
    said = "The gateway knows another key.";
  }
}

async function answerOf(response) {
  const text = await response.text();
  let answer = null;
  try {
    answer = JSON.parse(text);
  } catch {
    if (response.ok) throw new Refused("the answer is not JSON");
  }
  if (!response.ok) throw new Refused(answer?.error?.message ?? `${response.status} ${response.statusText}`);
  return answer;
}

export function wordsOf(error) {
  if (error instanceof Refused) return error.message;
  if (error.name === "TimeoutError") return "the gateway did not answer in time";
  return "the gateway cannot be reached";
}

let remembered = null; // Where storage is forbidden.

export function adminKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return remembered;
  }
}

function rememberKey(key) {
  remembered = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Then it lasts until the page is left.
  }
  showKey();
}

function forgetKey() {
  remembered = null;
  try {
    sessionStorage.removeItem(KEY);
  } catch {
    // It was not kept there.
  }
  showKey();
}

function showKey() {
  byId("key-button").textContent = adminKey() ? "Forget admin key" : "Admin key";
}

// The key that the operator gives, or null.
function askKey(said) {
  const dialog = byId("key-dialog");
  const text = byId("key-text");
  text.value = "";
  text.setCustomValidity("");
  byId("key-said").textContent = said;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = dialog.returnValue === "use" ? text.value.trim() : "";
      if (key) rememberKey(key);
      resolve(key || null);
    }, { once: true });
  });
}

export function startKey() {
  byId("key-button").addEventListener("click", () => (adminKey() ? forgetKey() : askKey("")));
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
  showKey();
}
