// What the page and the documentation share: elements, the API key, requests, curl lines.

const KEY = "service-streamer-key";

/** Build an element. Text is always set as text, so an answer cannot bring markup into the page. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "value") element.value = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(name, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Set a text only where it changes: what is read aloud is not read again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// -- The API key ------------------------------------------------------------------------------

export const apiKey = () => sessionStorage.getItem(KEY);
const keyListeners = [];
export const onKey = (listener) => keyListeners.push(listener);

export function authorization() {
  const key = apiKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Ask for the key in the form of the page; `focus` where the user has just asked for something. */
export function askForKey({ focus }) {
  const note = apiKey() ? "The server does not know this key." : "The server asks for an API key.";
  byId("key-form").hidden = false;
  say(byId("key-note"), note);
  if (focus) byId("key-input").focus();
}

export function initKey() {
  const form = byId("key-form");
  const input = byId("key-input");
  const forget = byId("forget");
  const changed = () => {
    forget.hidden = !apiKey();
    for (const listener of keyListeners) listener();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const key = input.value.trim();
    // fetch refuses such a header with an unclear message.
    if (!/^[\x21-\x7e]+$/.test(key)) {
      say(byId("key-note"), "A key consists of letters, digits and signs without spaces.");
      input.focus();
      return;
    }
    sessionStorage.setItem(KEY, key);
    input.value = "";
    form.hidden = true;
    changed();
  });
  forget.addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    changed();
  });
  forget.hidden = !apiKey();
}

// -- Models -----------------------------------------------------------------------------------

/** Links to the same page of each model, if there are several; `current` is the one shown. */
export function showModels(models = [], current) {
  const here = new URL(".", location.href).pathname;
  const root = here.replace(/\/models\/.*$/, "/");
  const page = location.pathname.slice(here.length);
  const links = models.map((name) => {
    const place = name.split("/").map(encodeURIComponent).join("/");
    return h("a", { href: `${root}models/${place}/${page}`, "aria-current": name === current && "page" }, name);
  });
  byId("models").replaceChildren(...links);
  byId("models").hidden = models.length < 2;
}

// -- Requests -----------------------------------------------------------------------------------

/**
 * Send a request and read the answer to its end.
 *
 * `onText` sees what has come so far, for answers without an end.
 * Answers {status, headers, text, json, seconds}; json is undefined where the text is none.
 */
export async function send(method, path, { body, headers = {}, signal, onText } = {}) {
  const began = performance.now();
  const typed = body === undefined ? {} : { "Content-Type": "application/json" };
  const response = await fetch(path, {
    method,
    body,
    headers: { ...typed, ...authorization(), ...headers },
    signal,
    cache: "no-store",
  });
  let text = "";
  if (onText && response.body) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      text += part.value;
      onText(text, response);
    }
  } else {
    text = await response.text();
  }
  const seconds = (performance.now() - began) / 1000;
  let json;
  try {
    json = JSON.parse(text);
  } catch {
    json = undefined;
  }
  return { status: response.status, headers: response.headers, text, json, seconds };
}

/** The message of an error answer, in the server's words where it has some. */
export function messageOf(answer) {
  const error = answer.json?.error;
  return error?.message ?? (answer.text.slice(0, 300).trim() || "The answer is empty.");
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The line for a shell; `short` leaves out the middle of what is too long to look at. */
export function curlLine(method, path, { body, headers = {}, withKey = false, streams = false } = {}, short = false) {
  const url = new URL(path, document.baseURI).href;
  const curl = streams ? "curl -N" : "curl"; // which shows each output as it comes
  const parts = [method === "GET" ? curl : `${curl} -X ${method}`, quoted(url)];
  if (body !== undefined) parts.push(`-H 'Content-Type: application/json'`);
  if (withKey || apiKey()) parts.push(`-H "Authorization: Bearer $API_KEY"`);
  for (const [name, value] of Object.entries(headers)) parts.push(`-H ${quoted(`${name}: ${value}`)}`);
  if (body !== undefined) {
    const cut = short && body.length > 1200 ? `${body.slice(0, 500)} … ${body.slice(-200)}` : body;
    parts.push(`-d ${quoted(cut)}`);
  }
  return parts.length > 2 ? `${parts[0]} ${parts.slice(1).join(" \\\n  ")}` : parts.join(" ");
}

/** Have a button copy the text of `read`; it says so for a moment. */
export function copies(button, read) {
  const label = button.textContent;
  let timer;
  button.addEventListener("click", async () => {
    let done = true;
    try {
      await navigator.clipboard.writeText(read());
    } catch {
      done = copyOldWay(read()); // without TLS there is no clipboard but on localhost
    }
    button.textContent = done ? "Copied" : "Not allowed";
    clearTimeout(timer);
    timer = setTimeout(() => (button.textContent = label), 1500);
  });
}

function copyOldWay(text) {
  const before = document.activeElement;
  const area = h("textarea", { class: "hidden-visually", value: text, "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}

// -- Figures and JSON -----------------------------------------------------------------------------

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 10) return `${seconds.toFixed(1)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  const ms = seconds * 1000;
  return `${ms >= 10 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

export function percent(share) {
  const value = share * 100;
  return value > 0 && value < 0.1 ? "< 0.1 %" : `${value.toFixed(1)} %`;
}

export const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

const TOKEN = /("(?:[^"\\]|\\.)*")(\s*:)?|\b(?:true|false|null)\b|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
const COLOURED = 60_000; // characters: more elements than that make a page slow

/** JSON as indented text, with names, strings and figures told apart. */
export function jsonView(value) {
  const text = JSON.stringify(value, null, 2);
  const view = h("pre", { class: "json", tabindex: "0", role: "region", "aria-label": "Answer as JSON" });
  if (text.length > COLOURED) {
    view.textContent = text;
    return view;
  }
  let end = 0;
  for (const match of text.matchAll(TOKEN)) {
    view.append(text.slice(end, match.index));
    const kind = match[2] ? "name" : match[1] ? "string" : "figure";
    view.append(h("span", { class: `json-${kind}` }, match[1] ?? match[0]), match[2] ?? "");
    end = match.index + match[0].length;
  }
  view.append(text.slice(end));
  return view;
}

/** Follow "$ref": "#/components/..." in an OpenAPI document, as often as it takes. */
export function resolved(api, node) {
  for (let hops = 0; node?.$ref && hops < 20; hops += 1) {
    const path = node.$ref.replace(/^#\//, "").split("/");
    node = path.reduce((at, key) => at?.[key.replaceAll("~1", "/").replaceAll("~0", "~")], api);
  }
  return node ?? {};
}
