// The fields of a request's parameters, made from the schema that /openapi.json has of them.

import { byId, h, resolved } from "./shared.js";

const LABELS = "candidate_labels";

/** Of the endpoints of generated text: what the page has no view or no use for. */
const HIDDEN = new Set(["num_return_sequences", "logprobs", "logit_bias", "json_schema", "details", "stop_sequences",
  "decoder_input_details", "watermark", "grammar"]);

/** Fields of a chat's request that are parameters of the text. */
const OF_CHATS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
  "repetition_penalty", "stop", "seed"];

export class WrongInput extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** The schemas of an endpoint's parameters by name; none where it takes none. */
async function schemasOf(path) {
  try {
    const api = await (await fetch("openapi.json", { cache: "no-store" })).json();
    const body = api.paths[`/${path}`].post.requestBody.content["application/json"];
    const request = resolved(api, body.schema);
    if (!request.properties.parameters) {
      return Object.fromEntries(OF_CHATS.filter((name) => request.properties[name])
        .map((name) => [name, request.properties[name]]));
    }
    return resolved(api, request.properties.parameters).properties ?? {};
  } catch {
    return {}; // the input can be sent without them
  }
}

/** "integer", "number", "boolean", "string", "strings" (a list), and null apart. */
function typeOf(schema) {
  const forms = schema.anyOf ?? schema.oneOf ?? [schema];
  if (forms.some((form) => form.type === "array")) return "strings";
  const types = forms.flatMap((form) => form.type ?? []);
  return types.find((type) => type !== "null") ?? "string";
}

function inputFor(schema, attributes) {
  const type = typeOf(schema);
  const common = { ...attributes, "data-type": type, autocomplete: "off" };
  const choices = type === "boolean" ? ["true", "false"] : schema.enum?.filter((choice) => choice !== null);
  if (choices) {
    return h("select", common, h("option", { value: "" }, "not given"),
      choices.map((choice) => h("option", { value: choice }, String(choice))));
  }
  if (type === "integer" || type === "number") {
    const { default: usual } = schema;
    const { minimum, maximum } = (schema.anyOf ?? []).find((form) => form.type === type) ?? schema;
    return h("input", { ...common, type: "number", step: type === "integer" ? 1 : "any", min: minimum, max: maximum, placeholder: usual });
  }
  return h("input", { ...common, type: "text", spellcheck: "false" });
}

/** A description that begins with a capital letter and ends with a full stop. */
const sentence = (text) => text && `${text[0].toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;

function fieldFor(name, label, schema, more = {}) {
  const id = `field-${name}`;
  const told = schema.description ?? schema.anyOf?.find((form) => form.description)?.description ?? "";
  const about = [sentence(told), typeOf(schema) === "strings" ? "Separate several with commas." : ""];
  const input = inputFor(schema, { id, "data-name": name, "aria-describedby": `about-${name} error-${name}`, ...more });
  return h("div", { class: "field" }, h("label", { for: id }, label), input,
    h("p", { id: `about-${name}`, class: "hint" }, about.filter(Boolean).join(" ")),
    h("p", { id: `error-${name}`, class: "error", role: "alert" }));
}

/** Fill the form with the fields of what is served. */
export async function buildParameters(info, path) {
  const schemas = info.takes_parameters === false ? {} : await schemasOf(path);
  const limit = { type: "number", minimum: 0, default: info.timeout, description: "Sent as the header X-Request-Timeout; status 504 after it." };
  const fields = Object.entries(schemas)
    .filter(([name]) => !(info.candidate_labels_required && name === LABELS) && !HIDDEN.has(name))
    .map(([name, schema]) => fieldFor(name, name, schema));
  byId("fields").replaceChildren(...fields, fieldFor("timeout", "Time limit in seconds", limit));
  const labels = fieldFor(LABELS, "Candidate labels", { type: "array" }, { value: "praise, complaint, question" });
  byId("main-fields").replaceChildren(...(info.candidate_labels_required ? [labels] : []));
}

/** {parameters, headers} of the filled fields. */
export function readParameters() {
  const parameters = {};
  const headers = {};
  for (const field of document.querySelectorAll("#form [data-name]")) {
    const { name, type } = field.dataset;
    if (field.validity.badInput) throw new WrongInput(name, "This is not a number.");
    const value = field.value.trim();
    if (!value) continue;
    if (name === "timeout") headers["X-Request-Timeout"] = value;
    else parameters[name] = valueOf(type, value);
  }
  return { parameters, headers };
}

function valueOf(type, text) {
  if (type === "integer" || type === "number") return Number(text);
  if (type === "boolean") return text === "true";
  if (type === "strings") return text.split(",").map((part) => part.trim()).filter(Boolean);
  return text;
}
