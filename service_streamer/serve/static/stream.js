// An answer in parts: server-sent events as they come, and what is shown of them.

import { duration, h, plural } from "./shared.js";

const SHOWN = 200; // outputs that are no text: the oldest ones beyond it leave the page
const LEAST = 0.02; // seconds between first and last output, below which a rate means nothing

/** Reads events from a text that grows: `take` gets the data of each event, once. */
export function eventReader(take) {
  let end = 0;
  return (text) => {
    for (let stop = text.indexOf("\n\n", end); stop >= 0; stop = text.indexOf("\n\n", end)) {
      const lines = text.slice(end, stop).split("\n");
      end = stop + 2;
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (data.length) take(data.join("\n"));
    }
  };
}

/**
 * What a stream shows: {node, take, text, gist, error, isWhole}.
 *
 * `prompt` is the text that goes on, if it does. Texts are joined; other outputs get a line each. The pace is below them, and is not read aloud.
 */
export function streamView(prompt) {
  const began = performance.now();
  const text = h("span");
  const paragraph = h("p", { class: "completion", hidden: true }, prompt ? h("span", { class: "muted" }, prompt) : "", text);
  const list = h("ol", { class: "outputs", hidden: true });
  const pace = h("p", { id: "pace", class: "muted" }, "Waiting for the first output");
  const view = { node: h("div", { class: "stream" }, paragraph, list, pace), error: null, isWhole: false };
  let count = 0; // outputs; of a model that generates texts, tokens
  let name = "output";
  let first = 0;
  const show = (output) => {
    const piece = typeof output === "string" ? output : output?.text ?? output?.content;
    if (typeof piece === "string") {
      paragraph.hidden = false;
      text.append(piece);
      return;
    }
    list.hidden = false;
    list.append(h("li", { value: count }, h("code", {}, JSON.stringify(output))));
    if (list.children.length > SHOWN) list.firstChild.remove();
  };
  view.gist = () => {
    const seconds = (performance.now() - began) / 1000;
    // The first one came after its own time: the rate is of those after it.
    const rate = count > 1 && seconds - first > LEAST ? `, ${((count - 1) / (seconds - first)).toFixed(1)}/s` : "";
    return count ? `${plural(count, name)}${rate}, the first after ${duration(first)}` : "No output";
  };
  view.text = () => text.textContent;
  view.take = (data) => {
    if (data === "[DONE]") {
      view.isWhole = true;
      return;
    }
    const event = JSON.parse(data);
    if (event.error) {
      view.error = event.error;
      return;
    }
    const delta = event.choices?.[0]?.delta;
    if (event.usage) count = event.usage.completion_tokens; // those without a text, too
    else if (delta && !delta.content) return; // OpenAI's first chunk and last one, without a token
    else count = event.token ? event.index : count + 1;
    if (event.token || event.choices) name = "token";
    if (!first) first = (performance.now() - began) / 1000;
    if (!event.usage) show(delta ?? event.output ?? event.token);
    pace.textContent = view.gist();
  };
  return view;
}
