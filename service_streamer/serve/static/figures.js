// The live figures of one snapshot: lines, columns, tables.

import { byId, duration, h, plural, say, svg } from "./shared.js";

export const WINDOW = 120; // seconds that the line of the rate shows

const figure = (x) => (x >= 100 ? Math.round(x).toLocaleString("en") : x >= 10 || x === 0 ? x.toFixed(0) : x.toFixed(1));

/** Draw a snapshot; `history` has the rates of the last two minutes, null where nothing was heard. */
export function drawFigures(snapshot, history) {
  say(byId("rate"), figure(snapshot.rate));
  drawSpark(snapshot, history);
  const latency = snapshot.latency ?? {};
  for (const name of ["p50", "p90", "p99"]) say(byId(name), duration(latency[name] ?? null));
  drawBatches(snapshot.batch_sizes ?? []);
  drawExplanation(snapshot.explanation ?? []);
  drawQueue(snapshot.queue);
  drawWorkers(snapshot);
  drawTotals(snapshot);
}

function drawSpark({ time, rate }, history) {
  const spark = byId("spark");
  const [width, height, top] = [480, 96, 6];
  const heard = history.filter((point) => point.rate !== null).map((point) => point.rate);
  const peak = Math.max(...heard);
  const most = niceTop(peak);
  const x = (point) => (width * (1 - (time - point.time) / WINDOW)).toFixed(1);
  const y = (point) => (height - 1 - ((height - top - 1) * point.rate) / most).toFixed(1);
  let line = "";
  let area = "";
  for (const run of runs(history)) {
    const path = run.map((point) => `${x(point)} ${y(point)}`).join("L");
    line += `M${path}`;
    area += `M${x(run[0])} ${height}L${path}L${x(run.at(-1))} ${height}Z`;
  }
  const grid = [0.5, 1].map((share) => `M0 ${height - 1 - (height - top - 1) * share}H${width}`).join("");
  const paths = [["grid", grid], ["area", area], ["line", line]];
  spark.replaceChildren(...paths.map(([name, d]) => svg("path", { class: name, d })));
  say(byId("rate-peak"), `peak ${figure(peak)} · top line ${figure(most)}`);
  spark.setAttribute("aria-label", `Requests per second over the last two minutes: now ${figure(rate)}, at most ${figure(peak)}`);
}

/** The points between the gaps. */
function runs(points) {
  const all = [[]];
  for (const point of points) {
    if (point.rate === null) all.push([]);
    else all.at(-1).push(point);
  }
  return all.filter((run) => run.length);
}

/** A round figure at or above a rate. */
function niceTop(rate) {
  if (rate <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(rate));
  return power * [1, 2, 3, 4, 5, 6, 8, 10].find((step) => rate <= step * power);
}

function drawBatches(buckets) {
  const box = byId("batches");
  box.closest("section").hidden = !buckets.length; // over Redis the batches are cut elsewhere
  const filled = buckets.findLastIndex((bucket) => bucket.count > 0);
  const shown = buckets.slice(0, Math.max(filled + 1, Math.min(buckets.length, 5)));
  const most = Math.max(1, ...shown.map((bucket) => bucket.count));
  const total = shown.reduce((sum, bucket) => sum + bucket.count, 0);
  while (box.children.length > shown.length) box.lastChild.remove();
  shown.forEach((bucket, i) => {
    if (!box.children[i]) {
      box.append(h("div", {}, h("span", { class: "count" }),
        h("span", { class: "column" }, h("span", { class: "fill" })), h("span", { class: "upto" })));
    }
    const [count, column, upto] = box.children[i].children;
    say(count, bucket.count ? short(bucket.count) : "");
    column.firstChild.style.height = `${(100 * bucket.count) / most}%`;
    say(upto, bucketName(buckets, i));
  });
  say(byId("batch-note"), total ? `${plural(total, "batch").replace("batchs", "batches")} since the start` : "none yet");
  const words = shown.filter((b) => b.count).map((b) => `${b.count} of up to ${b.upto ?? "more"}`);
  box.setAttribute("aria-label", words.length ? `Batches by size: ${words.join(", ")}` : "No batch yet");
}

/** What the service says of its batches, in its own words. */
function drawExplanation(findings) {
  const list = byId("why");
  list.closest("section").hidden = !findings.length;
  while (list.children.length > findings.length) list.lastChild.remove();
  while (list.children.length < findings.length) list.append(h("li"));
  findings.forEach((text, i) => say(list.children[i], text));
}

function bucketName(buckets, i) {
  const low = i ? (buckets[i - 1].upto ?? 0) + 1 : 1;
  const high = buckets[i].upto;
  if (high === null || high === undefined) return `> ${low - 1}`;
  return low >= high ? String(high) : `${low}–${high}`;
}

const short = (n) =>
  n >= 1e6 ? `${(n / 1e6).toFixed(1)}M` : n >= 1e4 ? `${(n / 1e3).toFixed(0)}k` : n.toLocaleString("en");

function drawQueue(queue) {
  const limit = queue.max_pending;
  say(byId("pending"), queue.pending?.toLocaleString("en") ?? "–");
  say(byId("limit"), limit ? ` of at most ${limit.toLocaleString("en")}` : "");
  byId("computing").hidden = queue.in_flight === null; // over Redis nobody here knows
  say(byId("in-flight"), queue.in_flight?.toLocaleString("en") ?? "–");
  const bar = byId("queue-bar");
  const share = limit ? Math.min(1, (queue.pending ?? 0) / limit) : 0;
  bar.hidden = !limit;
  bar.classList.toggle("full", share > 0.9);
  bar.firstElementChild.style.width = `${share * 100}%`;
  bar.setAttribute("aria-label", limit ? `The queue is filled to ${Math.round(share * 100)} percent` : "The queue has no limit");
}

let usual = "–"; // the device of a worker that was not given one

/** Show the device that the model itself has reported. */
export function nameDevice(device) {
  usual = device ? deviceName(device, "–") : "–";
}

function deviceName(device, otherwise) {
  if (device === null) return otherwise;
  return /^\d/.test(device) ? `GPU ${device}` : device.toUpperCase();
}

function drawWorkers({ workers, redis, scaling }) {
  say(byId("scaling"), scaling ? `${scaling.wanted} wanted, ${scaling.least} to ${scaling.most} by the load` : "");
  byId("workers").hidden = !workers;
  byId("redis").hidden = !redis;
  if (redis) {
    say(byId("redis"), `Redis: ${redis.state}, ${plural(redis.hosts ?? 0, "worker host")}, ${(redis.queued ?? 0).toLocaleString("en")} queued`);
  }
  const body = byId("workers").tBodies[0];
  const rows = workers ?? [];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((worker, i) => {
    const row = body.rows[i] ?? body.appendChild(h("tr", {}, h("th", { scope: "row" }), h("td"),
      h("td", {}, h("span", { class: "dot", "aria-hidden": "true" }), h("span")), h("td", { class: "number" })));
    row.dataset.state = worker.state;
    say(row.cells[0], String(worker.number));
    say(row.cells[1], deviceName(worker.device, usual));
    say(row.cells[2].lastChild, worker.state);
    say(row.cells[3], String(worker.restarts));
    row.cells[3].classList.toggle("some", worker.restarts > 0);
  });
}

const TOTALS = ["requests", "answered", "failed", "cancelled", "retries", "restarts"];

function drawTotals({ totals, uptime, web_processes: processes }) {
  const list = byId("totals");
  const rejected = Object.entries(totals.rejected);
  const sum = rejected.reduce((all, [, count]) => all + count, 0);
  const values = [...TOTALS.map((name) => [name, totals[name]]), ["rejected", sum]];
  if (!list.children.length) {
    list.append(...values.map(([name]) => h("div", {}, h("dt", {}, name), h("dd", { id: `total-${name}` }))));
  }
  for (const [name, value] of values) {
    const cell = byId(`total-${name}`);
    say(cell, value?.toLocaleString("en") ?? "–");
    cell.classList.toggle("some", value > 0 && ["failed", "restarts"].includes(name));
  }
  const reasons = rejected.filter(([, count]) => count).map(([name, count]) => `${name.replaceAll("_", " ")} ${count.toLocaleString("en")}`);
  say(byId("rejected"), reasons.length ? `Rejected: ${reasons.join(", ")}` : "");
  say(byId("uptime"), `up ${span(uptime)}${processes > 1 ? `; ${processes} web processes` : ""}`);
}

function span(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"]];
  for (const [size, name] of units) if (seconds >= size) return `${Math.floor(seconds / size)} ${name}`;
  return `${Math.floor(seconds)} s`;
}
