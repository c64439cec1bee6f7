// The playground: a form for the served task, its request, and what came back.

import { askForKey, byId, copies, curlLine, duration, h, messageOf, onKey, say, send } from "./shared.js";
import { CHAT, chatRequest, chatView, forgetChat, hasTurns, keepTurn } from "./chat.js";
import { WrongInput, buildParameters, readParameters } from "./parameters.js";
import { render } from "./results.js";
import { eventReader, streamView } from "./stream.js";

const TEXT_TASKS = ["fill-mask", "text-classification", "zero-shot-classification",
  "token-classification", "text-generation", "text2text-generation", "feature-extraction"];
const REASONS = {
  200: "OK", 400: "Bad request", 401: "Not authorised", 403: "Forbidden", 404: "Not found", 408: "Too slow",
  413: "Too large", 422: "Not valid", 429: "Too many requests", 500: "Server error", 502: "Bad gateway", 503: "Unavailable",
  504: "Timed out",
};

let info = null; // GET /info, as last heard
let talksTo = ""; // the model of the chat; the same one may be gone and come back
let running = null; // the AbortController of the request under way
let resend = false; // whether to send again once there is a key
let file = ""; // the picture or sound to send, as a data: URL
let retryTimer = 0;

/** Build the form for what is served, unless it is there already. */
export async function showTask(now) {
  const same = info && info.task === now.task && info.model === now.model;
  info = now;
  if (info.model && info.model !== talksTo) {
    running?.abort();
    forgetChat(); // it was with another model
    talksTo = info.model;
  }
  if (!info.task) {
    byId("input-field").replaceChildren(h("p", { class: "muted" },
      "The model is being loaded; its form appears here when it is ready."));
    return;
  }
  byId("stream-field").hidden = !canStream();
  if (same) return showCurl();
  buildInput();
  await buildParameters(info, pathNow());
  byId("send").disabled = false;
  byId("result").replaceChildren(h("p", { class: "muted placeholder" }, "The answer appears here."));
  say(byId("outcome"), "");
  clearProblems();
  showCurl();
}

// -- The form ---------------------------------------------------------------------------------------

/** What kind of file the task takes, as in <input accept>; "" for one that takes none. */
function fileKind() {
  if (info.task.startsWith("image-") || info.task === "object-detection") return "image";
  return /^(audio-|automatic-speech)/.test(info.task) ? "audio" : "";
}
const takesText = () => !fileKind() && (TEXT_TASKS.includes(info.task)
  || (info.task !== "custom" && typeof info.example === "string"));

function buildInput() {
  const field = byId("input-field");
  const described = { "aria-describedby": "hint input-error" };
  let hint = info.max_tokens ? `At most ${info.max_tokens} tokens.` : "";
  const kind = fileKind();
  if (kind) {
    const preview = h("img", { class: "preview", alt: "The picture to send" });
    const choose = h("input", { id: "input", type: "file", accept: `${kind}/*`, ...described });
    choose.addEventListener("change", () => readFile(choose.files[0], preview));
    field.replaceChildren(h("label", { for: "input" }, kind === "image" ? "Picture" : "Sound"), choose,
      preview, h("p", { id: "hint", class: "hint" }));
    setFile(typeof info.example === "string" ? asDataUrl(info.example, kind) : "", preview);
    return;
  }
  const text = takesText();
  const example = text ? String(info.example ?? "") : JSON.stringify(info.example ?? null, null, 2);
  const area = h("textarea", {
    id: "input", rows: text ? 3 : 6, spellcheck: "false", class: text ? null : "code", ...described, value: example,
  });
  if (!text) hint = "JSON for “inputs”: one item, or a list of items.";
  const prompt = info.chats ? "Message" : "Prompt";
  const label = text ? (info.task === "text-generation" ? prompt : "Text") : "Input";
  const head = h("div", { class: "row" }, h("label", { for: "input", id: "input-label" }, label));
  if (info.chats) head.append(modes());
  if (info.mask_token) {
    hint = `Write ${info.mask_token} in place of a missing word. ${hint}`;
    head.append(h("button", { type: "button", class: "small", onclick: () => insert(area, info.mask_token) },
      `Insert ${info.mask_token}`));
  }
  field.replaceChildren(head, area, h("p", { id: "hint", class: "hint" }, hint));
}

/** The choice between a chat and a text that goes on, for models that can do both. */
function modes() {
  const mode = (value, label) => h("label", { class: "check" },
    h("input", { type: "radio", name: "mode", value, checked: value === "chat" }), label);
  const anew = h("button", { type: "button", id: "new-chat", class: "small", hidden: !hasTurns(), onclick: startChat }, "New chat");
  const choice = h("div", { class: "modes", role: "radiogroup", "aria-label": "Mode" },
    anew, mode("chat", "Chat"), mode("text", "Text"));
  choice.addEventListener("change", changeMode);
  return choice;
}

const chats = () => document.querySelector("#form [name=mode]:checked")?.value === "chat";

async function changeMode() {
  say(byId("input-label"), chats() ? "Message" : "Prompt");
  byId("new-chat").hidden = !chats() || !hasTurns();
  clearProblems();
  await buildParameters(info, pathNow());
  showCurl();
}

function startChat() {
  running?.abort(); // its answer belongs to the old chat
  forgetChat();
  byId("new-chat").hidden = true;
  byId("result").replaceChildren(h("p", { class: "muted placeholder" }, "The answer appears here."));
  say(byId("outcome"), "");
  byId("input").focus();
  showCurl();
}

function insert(area, text) {
  area.focus();
  area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
  area.dispatchEvent(new Event("input", { bubbles: true }));
}

const asDataUrl = (text, kind) => (text.startsWith("data:") ? text : `data:${kind}/*;base64,${text}`);

function setFile(url, preview) {
  file = url;
  preview.hidden = !url.startsWith("data:image/");
  if (!preview.hidden) preview.src = url;
}

function readFile(chosen, preview) {
  if (!chosen) return;
  const reader = new FileReader();
  reader.addEventListener("load", () => {
    setFile(reader.result, preview);
    showCurl();
  });
  reader.readAsDataURL(chosen);
}

/** Where the input goes: the endpoint that suits the task best. */
function pathNow() {
  if (info.operations?.includes("embed")) return "v1/embeddings";
  if (chats()) return CHAT;
  return info.operations?.includes("generate") ? "generate" : "predict";
}

/** Whether there is something to stream: a model of steps has several outputs for an input. */
const canStream = () => Boolean(info.streams) && pathNow() !== "v1/embeddings";
const streams = () => canStream() && byId("stream").checked;

// -- The request --------------------------------------------------------------------------------------

function parsed(field, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new WrongInput(field, `This is not JSON: ${error.message}`);
  }
}

/** The request that the form stands for: {path, headers, payload}. */
function readForm() {
  const { parameters, headers } = readParameters();
  const raw = fileKind() ? file : byId("input").value;
  if (fileKind() && !raw) throw new WrongInput("inputs", "Choose a file first.");
  const inputs = fileKind() || takesText() ? raw : parsed("inputs", raw);
  const path = pathNow();
  if (path === CHAT) {
    if (!inputs.trim()) throw new WrongInput("inputs", "Write a message first.");
    return { path, headers, message: inputs, payload: chatRequest(info.model, inputs, parameters, streams()) };
  }
  if (path === "v1/embeddings") return { path, headers, payload: { model: info.model, input: inputs } };
  const more = Object.keys(parameters).length ? { parameters } : {};
  if (streams()) more.stream = true;
  return { path, headers, payload: { [path === "generate" ? "text" : "inputs"]: inputs, ...more } };
}

function curl(short) {
  const { path, headers, payload } = readForm();
  const options = { body: JSON.stringify(payload), headers, withKey: info.api_key_required, streams: payload.stream };
  return curlLine("POST", path, options, short);
}

function showCurl() {
  try {
    byId("curl").textContent = curl(true);
  } catch (error) {
    if (!(error instanceof WrongInput)) throw error;
    // Incomplete input: keep the old line.
  }
}

async function submit() {
  if (running) return running.abort();
  clearProblems();
  let sent;
  try {
    sent = readForm();
  } catch (error) {
    if (!(error instanceof WrongInput)) throw error;
    return showAt(error.field, error.message);
  }
  const body = JSON.stringify(sent.payload);
  const size = new Blob([body]).size;
  if (info.max_body && size > info.max_body) {
    return showAt("inputs", `The request has ${size} bytes, but the server's limit is ${info.max_body}.`);
  }
  running = new AbortController();
  const { signal } = running;
  const stop = tick();
  try {
    const prompt = info.task === "text-generation" ? sent.payload.text : ""; // others make a new text
    const view = sent.payload.stream ? streamView(prompt) : null;
    const onText = view && showParts(view, sent, signal);
    const answer = await send("POST", sent.path, { body, headers: sent.headers, signal, onText });
    signal.throwIfAborted(); // its last bytes may have come just before
    stop();
    if (answer.status === 200 && view) showEnd(view, sent, answer);
    else if (answer.status === 200) showAnswer(sent, answer);
    else showRefusal(answer);
  } catch (error) {
    stop();
    if (error.name === "AbortError") say(byId("outcome"), "Cancelled");
    else showProblem("The server cannot be reached.", "Is it still running? The line at the top shows when it is back.");
  } finally {
    running = null;
  }
}

/** While the answer is on its way: the button cancels, and the time is shown once it is long. */
function tick() {
  const began = performance.now();
  const button = byId("send");
  const result = byId("result");
  const outcome = byId("outcome");
  result.setAttribute("aria-busy", "true");
  say(outcome, "");
  outcome.dataset.state = "";
  const slow = setTimeout(() => {
    button.textContent = "Cancel";
    say(outcome, "Waiting for the answer");
  }, 400);
  const clock = setInterval(() => {
    button.textContent = `Cancel (${Math.floor((performance.now() - began) / 1000)} s)`;
  }, 1000);
  return () => {
    clearTimeout(slow);
    clearInterval(clock);
    button.textContent = "Send";
    result.setAttribute("aria-busy", "false");
  };
}

// -- What came back ---------------------------------------------------------------------------------------

function outcomeOf(answer, more = "") {
  const outcome = byId("outcome");
  outcome.dataset.state = answer.status === 200 ? "good" : "bad";
  const name = REASONS[answer.status] ? ` ${REASONS[answer.status]}` : "";
  outcome.replaceChildren(`${answer.status}${name}`, h("span", { class: "muted" }, ` in ${duration(answer.seconds)}`),
    h("span", { class: "hidden-visually" }, more ? `. ${more}` : ""));
}

function showAnswer(sent, answer) {
  if (sent.message !== undefined) return showTurn(sent, answer);
  const { nodes, gist } = render(info, sent.payload, answer.json ?? answer.text);
  byId("result").replaceChildren(...nodes);
  outcomeOf(answer, gist);
}

function showTurn(sent, answer) {
  const said = answer.json.choices[0].message.content;
  byId("result").replaceChildren(chatView(sent.message, h("p", { class: "completion" }, said)));
  endTurn(sent, said);
  outcomeOf(answer, said);
}

/** The answer belongs to the chat, and the next message can be written. */
function endTurn(sent, said) {
  keepTurn(sent.message, said);
  byId("new-chat").hidden = !hasTurns();
  if (byId("input").value === sent.message) byId("input").value = "";
  showCurl();
}

/** What shows the outputs of a stream, as soon as there is one. */
function showParts(view, sent, signal) {
  const read = eventReader(view.take);
  return (text, response) => {
    if (signal.aborted) return; // a part that was on its way
    if (!response.ok) return; // an error before the first output, which is shown as any other
    if (!view.node.isConnected) {
      const node = sent.message === undefined ? view.node : chatView(sent.message, view.node);
      byId("result").replaceChildren(node);
      say(byId("outcome"), "Streaming");
    }
    read(text);
  };
}

function showEnd(view, sent, answer) {
  outcomeOf(answer, view.gist());
  if (view.error === null && view.isWhole) {
    if (sent.message !== undefined) endTurn(sent, view.text());
    return;
  }
  byId("outcome").dataset.state = "bad";
  say(byId("outcome"), `Failed after ${duration(answer.seconds)}`);
  const error = view.error ?? { message: "The connection ended before the stream did." };
  const id = error.id ? `Its id in the server's log: ${error.id}` : "";
  showProblem("The stream failed after these outputs.", error.message, 0, id);
}

function showRefusal(answer) {
  outcomeOf(answer);
  const message = messageOf(answer);
  const error = answer.json?.error ?? {};
  const wait = Number(answer.headers.get("Retry-After")) || 0;
  if ([400, 413, 422].includes(answer.status)) return showAt(error.param ?? fieldIn(message), message);
  if (answer.status === 401) {
    resend = true;
    askForKey({ focus: true });
    return showProblem("An API key is needed.", "Give it in the form above; the request is then sent again.");
  }
  if (answer.status === 503) {
    const title = error.type === "overloaded" ? "Overloaded" : "Not available";
    return showProblem(`${title}: the request was refused.`, message, wait);
  }
  if (answer.status === 504) return showProblem("The request timed out.", message);
  const id = error.id ? `Its id in the server's log: ${error.id}` : "";
  return showProblem(answer.status >= 500 ? "The server failed." : "The request was refused.", message, 0, id);
}

const fieldIn = (message) => /^(inputs|text|input|prompt|messages|parameters\.\w+)\b/.exec(message)?.[1] ?? "inputs";

/** An error where it was made: at the input or at a parameter. */
function showAt(name, message) {
  const field = name.replace(/^parameters\.?/, "");
  const at = /^(inputs|messages)/.test(name) ? null : byId(`field-${field}`);
  const input = at ?? byId("input");
  if (at?.closest("details")) at.closest("details").open = true;
  input.setAttribute("aria-invalid", "true");
  byId(at ? `error-${field}` : "input-error").textContent = message;
  input.focus();
}

function showProblem(title, text, wait = 0, more = "") {
  const problem = byId("problem");
  const until = performance.now() + wait * 1000;
  const retry = h("p", { class: "retry" });
  problem.replaceChildren(h("strong", {}, title), h("p", {}, text), more ? h("p", {}, more) : "", wait ? retry : "");
  if (!wait) return;
  const count = () => {
    const left = Math.ceil((until - performance.now()) / 1000);
    // Screen readers hear only the first and the last text, not each second.
    retry.setAttribute("aria-live", left < wait && left > 0 ? "off" : "polite");
    retry.textContent = left > 0 ? `Retry in ${left} s.` : "You can retry now.";
    if (left > 0) retryTimer = setTimeout(count, 250);
  };
  count();
}

function clearProblems() {
  clearTimeout(retryTimer);
  byId("problem").replaceChildren();
  for (const error of document.querySelectorAll("#form .error")) error.textContent = "";
  for (const field of document.querySelectorAll("#form [aria-invalid]")) field.removeAttribute("aria-invalid");
}

export function initPlayground() {
  const form = byId("form");
  form.addEventListener("input", showCurl);
  if (/Mac|iP(hone|ad)/.test(navigator.platform)) byId("send-keys").firstElementChild.textContent = "⌘";
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || running || !info?.task) return;
    event.preventDefault();
    submit();
  });
  copies(byId("copy"), () => {
    try {
      return curl(false);
    } catch {
      return byId("curl").textContent;
    }
  });
  onKey(() => {
    if (!resend) return;
    resend = false;
    byId("send").focus();
    submit();
  });
}
