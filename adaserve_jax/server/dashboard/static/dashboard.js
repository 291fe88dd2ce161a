// Asks for a snapshot once a second while the page is seen, keeps the series of a quarter of an hour, and says when
// nobody answers. Talks to the server that the page came from, and to nobody else.

import { Panels } from "./panels.js";

const EVERY_MS = 1000, PATIENCE_MS = 5000, KEPT = 900;
const DATA = new URL("dashboard/data", location.origin + location.pathname);  // without credentials, which fetch refuses
const panels = new Panels();
const banner = document.getElementById("banner"), pill = document.getElementById("status");

let columns = null, seq = 0, started = null, answered = null, timer = null, asking = false;

async function ask() {
  const url = new URL(DATA);
  url.searchParams.set("since", seq);
  const response = await fetch(url, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
  if (response.status === 401) throw new Error("The server no longer takes this API key. Reload the page to give another one.");
  if (!response.ok) throw new Error(`The server answered ${response.status}. Asking again every second.`);
  return response.json();
}

function take(snapshot) {
  if (started !== snapshot.started_unix_s) {
    if (started !== null && seq) {  // another server: what was asked for began in the middle of its series
      started = null;
      seq = 0;
      columns = null;
      return false;
    }
    started = snapshot.started_unix_s;
  }
  columns ??= Object.fromEntries(Object.keys(snapshot.series).map((name) => [name, []]));
  for (const [name, values] of Object.entries(snapshot.series)) {
    columns[name].push(...values);
    columns[name].splice(0, Math.max(0, columns[name].length - KEPT));
  }
  seq = snapshot.seq;
  return true;
}

function tell(status, text) {
  pill.dataset.status = status;
  pill.textContent = { ok: "serving", lost: "no answer" }[status] ?? status;
  if (banner.textContent !== text) banner.textContent = text;
  banner.hidden = !text;
}

async function tick() {
  clearTimeout(timer);
  if (asking || document.visibilityState === "hidden") return;
  asking = true;
  try {
    const snapshot = await ask();
    if (take(snapshot)) {
      panels.update(snapshot, columns);
      answered = new Date();
      tell(snapshot.status, snapshot.status === "ok" ? "" : `Not serving: ${snapshot.detail}.`);
    }
  } catch (error) {
    const since = answered ? ` since ${answered.toLocaleTimeString("en-GB")}` : "";
    const network = error.name === "TypeError" || error.name === "TimeoutError";
    tell("lost", network ? `No answer from the server${since}. Asking again every second; the figures are those of then.` : error.message);
  }
  asking = false;
  timer = setTimeout(tick, EVERY_MS);
}

document.addEventListener("visibilitychange", tick);
tick();
