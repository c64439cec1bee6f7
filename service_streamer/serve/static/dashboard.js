// The live figures: GET /events, read as a stream, since an EventSource cannot send the API key.

import { WINDOW, drawFigures } from "./figures.js";
import { askForKey, authorization, byId, h, onKey, plural, say } from "./shared.js";

const STALE = 3.5; // seconds without a snapshot: one comes about each second
const SILENT = 15; // seconds after which a connection without snapshots is given up
const REFUSING = 6; // seconds that an overload is shown after the last refusal
const RECOVERED = 12; // seconds that a restart is shown after the worker is back
const LONGEST_WAIT = 15; // seconds between two attempts to connect
const CROWDED = 30; // seconds between two attempts with too many viewers
const HIDDEN = 60; // seconds after which a hidden tab closes its connection

const history = []; // {time, rate}, a rate of null without news
const deaths = new Map(); // number of a worker -> last time its death was shown
let last = null; // the last snapshot
let heard = 0; // when it came, by performance.now()
let refused = { at: -Infinity, count: 0 };
let connection = null; // its AbortController
let wait = 1;
let timer = 0;
let link = { state: "connecting", detail: "" };
let onServer = () => {}; // called when a server is heard (again), and as it becomes ready

const now = () => performance.now() / 1000;

// -- The stream -----------------------------------------------------------------------------------------

async function connect() {
  clearTimeout(timer);
  connection?.abort();
  const mine = new AbortController();
  connection = mine;
  let reason = "The server closed the connection.";
  try {
    const headers = { Accept: "text/event-stream", ...authorization() };
    const response = await fetch("events", { headers, signal: mine.signal, cache: "no-store" });
    if (response.status === 401) {
      link = { state: "locked", detail: "The live figures need the API key." };
      askForKey({ focus: false });
      void askHealth(mine.signal);
      return draw();
    }
    if (response.status === 403) { // a key for the model only, which is what `key new` makes
      link = { state: "locked", detail: "The live figures need a key with the scope metrics. This key does not have it." };
      void askHealth(mine.signal);
      return draw();
    }
    if (response.status === 503) {
      link = { state: "crowded", detail: "There are too many viewers of the live figures. The page retries by itself." };
      timer = setTimeout(connect, CROWDED * (0.8 + 0.4 * Math.random()) * 1000);
      void askHealth(mine.signal);
      return draw();
    }
    if (!response.ok) throw new Error(`/events answers ${response.status}`);
    await read(response.body);
    if (last?.state === "draining" && connection === mine) {
      timer = setTimeout(connect, 1000); // the stream is complete; the server is about to end
      return;
    }
  } catch (error) {
    if (mine.signal.aborted && connection !== mine) return; // replaced or closed
    reason = error.message.startsWith("/events") ? error.message : reason;
  }
  if (connection !== mine) return;
  link = { state: "unreachable", detail: reason, again: now() + wait };
  timer = setTimeout(connect, wait * (0.8 + 0.4 * Math.random()) * 1000);
  wait = Math.min(wait * 2, LONGEST_WAIT);
  draw();
}

async function read(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    buffer += part.value.replaceAll("\r", "");
    const events = buffer.split("\n\n");
    buffer = events.pop();
    events.forEach(take);
  }
}

function take(event) {
  let name = "message";
  const data = [];
  for (const line of event.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  if (name === "snapshot" && data.length) follow(JSON.parse(data.join("\n")));
}

/** Whether the server answers, but sends no figures. */
const isShut = () => link.state === "locked" || link.state === "crowded";

/** Without figures, the light uses /health/ready, which needs no key. */
async function askHealth(signal) {
  try {
    const response = await fetch("health/ready", { signal, cache: "no-store" });
    const { status } = await response.json();
    if (isShut()) showLight(status);
  } catch {
    if (isShut()) showLight("unreachable");
  }
}

// -- What a snapshot says -----------------------------------------------------------------------------------

function follow(snapshot) {
  const again = link.state !== "connected";
  const restarted = !last || snapshot.uptime < last.uptime;
  const before = restarted ? null : last;
  if (again && last) history.push({ time: snapshot.time, rate: null });
  if (restarted) {
    deaths.clear();
    refused = { at: -Infinity, count: 0 };
  }
  noteRefusals(before, snapshot);
  noteDeaths(before, snapshot);
  history.push({ time: snapshot.time, rate: snapshot.rate });
  while (history.length && history[0].time < snapshot.time - WINDOW - 2) history.shift();
  const ready = snapshot.ready && !last?.ready;
  last = snapshot;
  heard = now();
  wait = 1;
  link = { state: "connected", detail: "" };
  if (again || ready) onServer();
  draw();
}

function noteRefusals(before, snapshot) {
  const count = snapshot.totals.rejected.overloaded;
  const more = before ? count - before.totals.rejected.overloaded : 0;
  if (more <= 0) return;
  const goesOn = now() - refused.at < REFUSING;
  refused = { at: now(), count: (goesOn ? refused.count : 0) + more };
}

const isDown = (worker) =>
  worker.state === "backing off" || worker.state === "failed"
  || (worker.state === "starting" && worker.restarts > 0);

function noteDeaths(before, snapshot) {
  for (const worker of snapshot.workers ?? []) {
    const earlier = before?.workers?.find((each) => each.number === worker.number);
    if (isDown(worker) || (earlier && worker.restarts > earlier.restarts)) deaths.set(worker.number, now());
  }
}

/** The banners: [key, level, text]. */
function banners() {
  if (link.state === "unreachable") {
    return [["link", "bad", "The server does not answer. The page retries by itself, and shows the last figures."]];
  }
  if (isShut()) return [["link", "warn", link.detail]];
  if (!last) return [["link", "calm", "Connecting …"]];
  const list = [];
  if (now() - heard > STALE) {
    list.push(["stale", "warn", "There is no news from the server: the figures are out of date."]);
  }
  if (last.state === "draining") {
    list.push(["state", "warn", "The service is draining: it finishes open requests and refuses new ones."]);
  } else if (last.state === "broken" || last.state === "closed") {
    list.push(["state", "bad", `The service is broken: ${last.detail ?? "it answers no requests; see its log"}.`]);
  } else if (!last.ready) {
    const level = last.workers?.some(isDown) ? "bad" : "warn";
    const why = (last.detail ?? "").replace(/^no worker is ready; /, "");
    list.push(["state", level, `No worker is ready${why ? `: ${why}` : ""}.`]);
  }
  if (now() - refused.at < REFUSING) {
    list.push(["overload", "bad", "Requests are being refused: overloaded.",
      `${plural(refused.count, "request")} refused so far`]);
  }
  list.push(...losses());
  return list.length ? list : [["fine", "calm", fine()]];
}

/** Banners of the workers that died, grouped by their state now. */
function losses() {
  const numbers = { failed: [], down: [], back: [] };
  for (const worker of last.workers ?? []) {
    const recent = now() - (deaths.get(worker.number) ?? -Infinity) < RECOVERED;
    if (worker.state === "failed") numbers.failed.push(worker.number);
    else if (isDown(worker)) numbers.down.push(worker.number);
    else if (recent) numbers.back.push(worker.number);
  }
  const { failed, down, back } = numbers;
  const all = [
    [failed, "failed", "bad", (one) => `died and ${one ? "is" : "are"} not started again. The log says why.`],
    [down, "down", "bad", (one) => `died and ${one ? "is" : "are"} being restarted.`],
    [back, "back", "warn", (one) => `died and ${one ? "was" : "were"} restarted.`],
  ];
  return all.filter(([which]) => which.length).map(([which, key, level, rest]) => {
    const one = which.length === 1;
    return [key, level, `${one ? "Worker" : "Workers"} ${which.join(", ")} ${rest(one)}`];
  });
}

function fine() {
  if (last.redis) return `All is well: ${plural(last.redis.hosts ?? 0, "worker host")}.`;
  const up = (last.workers ?? []).filter((w) => w.state === "idle" || w.state === "busy").length;
  return `All is well: ${plural(up, "worker")} ready.`;
}

// -- Drawing --------------------------------------------------------------------------------------------------

function draw() {
  showBanners(banners());
  if (!isShut()) showLight(lightNow());
  showFreshness();
  if (link.state === "connected" && heard && now() - heard < 1) drawFigures(last, history);
}

function lightNow() {
  if (link.state === "unreachable") return "unreachable";
  if (!last) return "connecting";
  if (now() - heard > STALE) return "silent";
  if (last.state === "draining") return "draining";
  if (last.state === "broken" || last.state === "closed") return "broken";
  if (last.ready) return "ready";
  return last.state === "starting" && !last.workers?.some(isDown) ? "starting" : "not ready";
}

function showLight(state) {
  byId("light").dataset.state = state;
  say(byId("light-text"), state);
}

/** Banners stay the same elements while they say the same: each is read aloud once. */
function showBanners(list) {
  const box = byId("banners");
  const keys = new Set(list.map(([key]) => key));
  for (const old of [...box.children]) if (!keys.has(old.dataset.key)) old.remove();
  for (const [key, level, text, detail] of list) {
    let banner = [...box.children].find((each) => each.dataset.key === key);
    if (!banner) {
      banner = h("p", { class: "banner", "data-key": key });
      box.append(banner);
    }
    if (banner.dataset.level !== level) {
      banner.setAttribute("role", level === "bad" ? "alert" : "status");
      banner.dataset.level = level;
    }
    if (!banner.firstChild) banner.append(h("span"), h("span", { class: "detail", "aria-hidden": "true" }));
    say(banner.firstChild, text);
    say(banner.lastChild, detail ?? "");
  }
}

function showFreshness() {
  const old = heard ? now() - heard : 0;
  const stale = link.state !== "connected" || old > STALE;
  for (const part of document.querySelectorAll(".figures")) part.classList.toggle("stale", stale);
  const ago = heard ? `, last heard ${Math.round(old)} s ago` : "";
  const left = link.again ? Math.max(0, Math.ceil(link.again - now())) : 0;
  const words = {
    connected: stale ? `stale${ago}` : "each second",
    unreachable: `unreachable${ago}; next attempt ${left ? `in ${left} s` : "now"}`,
    locked: "locked",
    crowded: "not sent",
    paused: "paused",
    connecting: "waiting for the first figures",
  };
  say(byId("freshness"), words[link.state]);
}

// -- Start --------------------------------------------------------------------------------------------------------

/** Follow the server for as long as the page is there; `heardFrom` is called as it comes (back). */
export function initDashboard(heardFrom) {
  onServer = heardFrom;
  let hiding = 0;
  connect();
  setInterval(() => {
    // A connection may die silently, such as when a laptop has slept.
    if (link.state === "connected" && now() - heard > SILENT) connect();
    draw();
  }, 1000);
  onKey(connect);
  addEventListener("online", connect);
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (!document.hidden && connection === null) connect();
    if (document.hidden) hiding = setTimeout(pause, HIDDEN * 1000);
  });
}

/** A browser has six connections to a server: hidden tabs must not hold them. */
function pause() {
  clearTimeout(timer);
  const old = connection;
  connection = null;
  old?.abort();
  link = { state: "paused", detail: "" };
  draw();
}
