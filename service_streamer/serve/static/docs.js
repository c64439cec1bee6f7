// The documentation: every endpoint of /openapi.json, with a form to try it.

import { askForKey, byId, copies, curlLine, duration, h, initKey, jsonView, onKey, resolved as follow, send, showModels } from "./shared.js";

const METHODS = ["get", "post", "put", "patch", "delete", "head"];
const DEEPEST = 4; // levels of a schema that the table shows
const SHOWN = 20_000; // characters of a plain answer that are shown

let api = null;

// -- Schemas ------------------------------------------------------------------------------------------

const resolved = (node) => follow(api, node);
const refName = (schema) => schema?.$ref?.split("/").at(-1);

function typeName(schema, depth = 0) {
  const s = resolved(schema);
  if (depth > 3) return refName(schema) ?? "object";
  const several = s.anyOf ?? s.oneOf;
  if (several) return several.map((each) => typeName(each, depth + 1)).join(" or ");
  if (s.const !== undefined) return JSON.stringify(s.const);
  if (s.type === "array") return `list of ${s.items ? typeName(s.items, depth + 1) : "anything"}`;
  if (Array.isArray(s.type)) return s.type.join(" or ");
  if (s.allOf) return s.allOf.map((each) => typeName(each, depth + 1)).join(" and ");
  return s.type ?? (s.properties ? "object" : "anything");
}

const LIMITS = [
  ["minimum", "at least"], ["exclusiveMinimum", "more than"], ["maximum", "at most"],
  ["exclusiveMaximum", "less than"], ["minLength", "at least", "characters"], ["maxLength", "at most", "characters"],
  ["minItems", "at least", "items"], ["maxItems", "at most", "items"], ["pattern", "matches"], ["format", "format"],
];

function sentence(text) {
  return text[0].toUpperCase() + text.slice(1) + (/[.!?:]$/.test(text) ? "" : ".");
}

function notesOf(schema) {
  const s = resolved(schema);
  const notes = [];
  if (schema.description || s.description) notes.push(schema.description || s.description);
  if (s.enum) notes.push(`One of ${s.enum.map((value) => JSON.stringify(value)).join(", ")}`);
  const limits = LIMITS.filter(([key]) => s[key] !== undefined);
  if (limits.length) {
    notes.push(limits.map(([key, words, unit]) => [words, s[key], unit].filter((part) => part !== undefined).join(" ")).join(", "));
  }
  if (s.default !== undefined) notes.push(`Default: ${JSON.stringify(s.default)}`);
  return notes.map(sentence).join(" ");
}

/** The properties below a schema, whichever way they hang there: [name, schema, required]. */
function propertiesOf(schema) {
  const s = resolved(schema);
  if (s.properties) {
    return Object.entries(s.properties).map(([name, each]) => [name, each, s.required?.includes(name)]);
  }
  if (s.type === "array" && s.items) return propertiesOf(s.items);
  return (s.allOf ?? s.anyOf ?? s.oneOf ?? []).flatMap(propertiesOf);
}

function rowsOf(schema, depth = 0, seen = []) {
  return propertiesOf(schema).flatMap(([name, each, required]) => {
    const row = h("tr", {},
      h("td", { class: `indent-${depth}` }, name, required ? h("span", { class: "required" }, " required") : ""),
      h("td", {}, typeName(each)), h("td", {}, notesOf(each)));
    const circular = each.$ref && seen.includes(each.$ref);
    const deeper = depth < DEEPEST && !circular ? rowsOf(each, depth + 1, [...seen, each.$ref]) : [];
    return [row, ...deeper];
  });
}

const HEAD = ["Name", "Type", "Meaning"];

function tableOf(rows, caption) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("thead", {}, h("tr", {}, HEAD.map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, rows)));
}

function schemaView(schema, caption) {
  const rows = rowsOf(schema);
  const notes = notesOf(schema);
  const gist = h("p", { class: "muted" }, typeName(schema), notes ? `: ${notes}` : "");
  return rows.length ? [gist, tableOf(rows, caption)] : [gist];
}

/** A value that fits a schema, where nobody wrote an example. */
function sampleOf(schema, depth = 0) {
  const s = resolved(schema);
  if (s.example !== undefined) return s.example;
  if (s.examples?.length) return s.examples[0];
  if (s.default !== undefined) return s.default;
  if (s.const !== undefined) return s.const;
  if (s.enum) return s.enum[0];
  const one = (s.anyOf ?? s.oneOf)?.[0];
  if (one) return sampleOf(one, depth + 1);
  if (s.allOf) return Object.assign({}, ...s.allOf.map((each) => sampleOf(each, depth + 1)));
  const type = Array.isArray(s.type) ? s.type[0] : s.type;
  if (type === "array") return s.items && depth < DEEPEST ? [sampleOf(s.items, depth + 1)] : [];
  if (s.properties && depth < DEEPEST) {
    const needed = Object.entries(s.properties).filter(([name]) => s.required?.includes(name));
    return Object.fromEntries(needed.map(([name, each]) => [name, sampleOf(each, depth + 1)]));
  }
  return { string: "text", integer: s.minimum ?? 1, number: s.minimum ?? 1, boolean: true, null: null }[type] ?? {};
}

/** [name, value] for each example of a media type. */
function examplesOf(media) {
  const named = Object.entries(media.examples ?? {}).map(([name, example]) => {
    const each = resolved(example);
    return [each.summary ?? name, each.value];
  });
  if (named.length) return named;
  if (media.example !== undefined) return [["Example", media.example]];
  const { example, examples } = resolved(media.schema);
  if (example !== undefined) return [["Example", example]];
  return (examples ?? []).map((value, i) => [examples.length > 1 ? `Example ${i + 1}` : "Example", value]);
}

const pretty = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

// -- An endpoint ----------------------------------------------------------------------------------------

const anchor = (method, path) => `${method}${path.replaceAll(/[^\w]+/g, "-")}`;

function endpointView({ method, path, operation, shared }) {
  const id = anchor(method, path);
  const parameters = [...shared, ...(operation.parameters ?? [])].map(resolved);
  const body = operation.requestBody ? resolved(operation.requestBody) : null;
  const heading = `${id}-title`;
  const section = h("section", { class: "endpoint panel", id, "aria-labelledby": heading },
    h("h3", { id: heading }, h("span", { class: "verb" }, method), path),
    operation.summary ? h("p", { class: "summary" }, operation.summary) : null,
    operation.description ? h("p", { class: "muted" }, operation.description) : null);
  if (parameters.length) {
    const rows = parameters.map((p) => h("tr", {},
      h("td", {}, p.name, p.required ? h("span", { class: "required" }, " required") : ""),
      h("td", {}, `${typeName(p.schema ?? {})}, in the ${p.in}`),
      h("td", {}, [p.description && sentence(p.description), notesOf(p.schema ?? {})].filter(Boolean).join(" "))));
    section.append(h("h4", {}, "Parameters"), tableOf(rows, `Parameters of ${path}`));
  }
  for (const [type, media] of Object.entries(body?.content ?? {})) {
    section.append(h("h4", {}, `Request, ${type}`), ...schemaView(media.schema ?? {}, `Request of ${path}`));
  }
  section.append(h("h4", {}, "Responses"), ...Object.entries(operation.responses ?? {}).map(responseView));
  section.append(tryView({ id, method, path, parameters, body, operation }));
  return section;
}

function responseView([status, response]) {
  const { description = "", content = {}, headers = {} } = resolved(response);
  const parts = [];
  for (const [name, header] of Object.entries(headers)) {
    const { description: meaning = "", schema = {} } = resolved(header);
    parts.push(h("p", {}, h("code", {}, name), ` ${typeName(schema)}. ${meaning}`));
  }
  for (const [type, media] of Object.entries(content)) {
    parts.push(h("p", {}, h("code", {}, type)), ...schemaView(media.schema ?? {}, `Response ${status}`));
    for (const [name, value] of examplesOf(media)) {
      parts.push(h("p", { class: "muted" }, name), h("pre", { tabindex: "0" }, pretty(value)));
    }
  }
  const title = [h("b", { "data-class": status[0] }, status), ` ${description}`];
  return parts.length
    ? h("details", { class: "response" }, h("summary", {}, title), parts)
    : h("p", { class: "response" }, title);
}

// -- Try it -----------------------------------------------------------------------------------------------

function tryView({ id, method, path, parameters, body, operation }) {
  const media = body?.content?.["application/json"];
  const inputs = parameters.filter((p) => p.in !== "cookie").map((p) => parameterField(id, p));
  const area = media && h("textarea", { id: `${id}-body`, class: "code", rows: 6, spellcheck: "false" });
  const examples = media ? examplesOf(media) : [];
  if (media && !examples.length) examples.push(["Example", sampleOf(media.schema ?? {})]);
  const choice = examples.length > 1 && h("select", { id: `${id}-example` },
    examples.map(([name], i) => h("option", { value: i }, name)));
  const line = h("pre", { class: "line", tabindex: "0", role: "region", "aria-label": "curl line" });
  const copy = h("button", { type: "button" }, "Copy");
  const go = h("button", { class: "primary", type: "submit" }, "Send");
  const answer = h("div", { class: "answer", "aria-live": "polite" });
  const secured = (operation.security ?? api.security ?? []).length > 0;
  const read = () => requestOf(path, inputs, area);
  const showLine = () => {
    const { url, headers, text } = read();
    line.textContent = curlLine(method.toUpperCase(), url, { body: text, headers, withKey: secured && Boolean(api.keyRequired) });
  };
  const fill = (i) => {
    area.value = pretty(examples[i][1]);
    showLine();
  };
  const form = h("form", { class: "try", novalidate: true, "aria-label": `Try ${method} ${path}` },
    h("h4", {}, "Try it"), inputs.map(({ field }) => field),
    choice && h("div", { class: "field" }, h("label", { for: choice.id }, "Example"), choice),
    area && h("div", { class: "field" }, h("label", { for: area.id }, "Body"), area),
    h("div", { class: "actions" }, go, copy), line, answer);
  form.addEventListener("input", showLine);
  onKey(showLine);
  copies(copy, () => line.textContent);
  if (area) fill(0);
  else showLine();
  if (choice) choice.addEventListener("change", () => fill(Number(choice.value)));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  let running = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return running.abort();
    running = new AbortController();
    go.textContent = "Stop";
    await trial(method, read(), answer, running.signal);
    running = null;
    go.textContent = "Send";
  });
  return form;
}

function parameterField(id, parameter) {
  const schema = resolved(parameter.schema ?? {});
  const name = `${id}-${parameter.name}`;
  const given = parameter.example ?? schema.example ?? "";
  const input = schema.enum
    ? h("select", { id: name }, parameter.required ? null : h("option", { value: "" }, "–"),
      schema.enum.map((value) => h("option", { value }, String(value))))
    : h("input", { id: name, autocomplete: "off", value: String(given) });
  const label = h("label", { for: name }, parameter.name, h("span", { class: "muted" }, ` ${parameter.in}`));
  return { parameter, input, field: h("div", { class: "field" }, label, input) };
}

function requestOf(path, inputs, area) {
  const headers = {};
  const query = new URLSearchParams();
  let url = path.replace(/^\//, "");
  for (const { parameter, input } of inputs) {
    const { value } = input;
    if (parameter.in === "path") url = url.replace(`{${parameter.name}}`, encodeURIComponent(value));
    else if (value && parameter.in === "query") query.set(parameter.name, value);
    else if (value && parameter.in === "header") headers[parameter.name] = value;
  }
  if (query.size) url += `?${query}`;
  return { url: url || "./", headers, text: area ? area.value : undefined };
}

async function trial(method, { url, headers, text }, box, signal) {
  const head = h("p", { class: "head" }, "Waiting for the answer");
  const part = h("pre", { tabindex: "0", hidden: true });
  box.replaceChildren(head, part);
  const onText = (so_far, response) => {
    const stream = response.headers.get("Content-Type")?.startsWith("text/event-stream");
    if (!stream) return;
    head.textContent = `${response.status}, an answer without an end; the last of it:`;
    part.hidden = false;
    part.textContent = so_far.slice(-2000);
  };
  try {
    const answer = await send(method.toUpperCase(), url, { body: text, headers, signal, onText });
    if (answer.status === 401) askForKey({ focus: true });
    showTrial(box, answer);
  } catch (error) {
    const stopped = error.name === "AbortError";
    head.textContent = stopped ? "Stopped." : `Not sent, or no answer came: ${error.message}.`;
  }
}

function showTrial(box, answer) {
  const status = h("b", {}, String(answer.status));
  const type = answer.headers.get("Content-Type") ?? "no content";
  const wait = answer.headers.get("Retry-After");
  const facts = [` in ${duration(answer.seconds)}`, type, wait && `Retry-After: ${wait}`].filter(Boolean).join(" · ");
  const view = answer.json !== undefined ? jsonView(answer.json)
    : h("pre", { tabindex: "0" }, answer.text.slice(0, SHOWN) || "(empty)");
  box.replaceChildren(h("p", { class: "head" }, status, h("span", { class: "muted" }, facts)), view);
}

// -- The page -----------------------------------------------------------------------------------------------

function endpointsOf() {
  return Object.entries(api.paths ?? {}).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) =>
      ({ method, path, operation: item[method], shared: item.parameters ?? [] })));
}

function show() {
  const groups = new Map();
  for (const endpoint of endpointsOf()) {
    const tag = endpoint.operation.tags?.[0] ?? "Endpoints";
    groups.set(tag, [...(groups.get(tag) ?? []), endpoint]);
  }
  for (const [tag, endpoints] of groups) {
    byId("index").append(h("h2", {}, tag), h("ul", {}, endpoints.map(({ method, path }) =>
      h("li", {}, h("a", { href: `#${anchor(method, path)}` }, h("span", { class: "verb" }, method), path)))));
    byId("endpoints").append(h("h2", { class: "hidden-visually" }, tag), ...endpoints.map(endpointView));
  }
  // The endpoint that the address names was not there yet as the browser looked for it.
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
}

async function start() {
  initKey();
  try {
    const response = await fetch("openapi.json", { cache: "no-store" });
    if (!response.ok) throw new Error(`it answers ${response.status}`);
    api = await response.json();
  } catch (error) {
    byId("banners").replaceChildren(h("p", { class: "banner", "data-level": "bad" },
      `/openapi.json cannot be read: ${error.message}. Load the page again when the server is there.`));
    return;
  }
  try {
    const info = await (await fetch("info", { cache: "no-store" })).json();
    api.keyRequired = info.api_key_required;
    showModels(info.models, info.model);
  } catch {
    api.keyRequired = false; // only the curl lines know less
  }
  byId("title").textContent = api.info?.title ?? "API";
  byId("facts").textContent = api.info?.summary ?? api.info?.description ?? "";
  byId("version").textContent = `Version ${api.info?.version ?? "unknown"}`;
  show();
}

start();
