// The page: who is served at the top, the playground, and the live figures.

import { byId, initKey, say, showModels } from "./shared.js";
import { initDashboard } from "./dashboard.js";
import { nameDevice } from "./figures.js";
import { initPlayground, showTask } from "./playground.js";

const AGAIN = 2; // seconds until a server that does not know its model yet is asked again

let asking = 0;

async function askInfo() {
  clearTimeout(asking);
  try {
    const response = await fetch("info", { cache: "no-store" });
    if (!response.ok) throw new Error(`/info answers ${response.status}`);
    const info = await response.json();
    showServed(info);
    await showTask(info);
    if (info.task) return;
  } catch {
    // The line at the top says that the server does not answer.
  }
  asking = setTimeout(askInfo, AGAIN * 1000);
}

function showServed(info) {
  const name = info.model ?? "service-streamer";
  say(byId("model"), name);
  showModels(info.models, info.model);
  document.title = `${name} · service-streamer`;
  nameDevice(info.device);
  const facts = [info.task, info.device, info.dtype, info.batch_size && `batches of up to ${info.batch_size}`,
    info.version && `version ${info.version}`];
  say(byId("facts"), facts.filter(Boolean).join(" · "));
  // A link cannot carry the key; the form in the documentation does.
  byId("metrics").href = info.api_key_required ? "docs#get-metrics" : "metrics";
  say(byId("version"), `service-streamer ${info.version ?? ""}`);
}

initKey();
initPlayground();
initDashboard(askInfo);
askInfo();
