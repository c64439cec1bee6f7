// How the answer of each task is shown. Each function gets the answer and what was sent.

import { h, jsonView, percent, plural, svg } from "./shared.js";

/** What to put on the page for an answer, and one sentence of it for those who listen. */
export function render(info, sent, answer) {
  const show = VIEWS[info.task] ?? showRaw;
  try {
    return show(info, sent, answer) ?? showRaw(info, sent, answer);
  } catch {
    return showRaw(info, sent, answer); // a pipeline may answer in a form that is not known here
  }
}

const VIEWS = {
  "fill-mask": showWords,
  "text-classification": showLabels,
  "image-classification": showLabels,
  "zero-shot-classification": showLabels,
  "audio-classification": showLabels,
  "object-detection": showLabels,
  "token-classification": showEntities,
  "text-generation": showCompletion,
  "feature-extraction": showEmbedding,
};

function bar(share) {
  const fill = h("span", { class: "fill" });
  fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return h("span", { class: "track", "aria-hidden": "true" }, fill);
}

// -- fill-mask ------------------------------------------------------------------------------------

/** The sentence, the best word in each gap; a word of the list goes into its gap on a click. */
function showWords(info, sent, answer) {
  const gaps = Array.isArray(answer[0]) ? answer : [answer];
  if (!gaps.every((words) => words.length && "token_str" in words[0])) return null;
  const sentence = h("p", { class: "sentence", "aria-live": "polite" });
  const slots = [];
  String(sent.inputs).split(info.mask_token).forEach((text, i) => {
    if (i > 0) {
      slots.push(h("mark", {}, gaps[i - 1]?.[0].token_str.trim() ?? info.mask_token));
      sentence.append(slots[i - 1]);
    }
    sentence.append(text);
  });
  const lists = gaps.map((words, gap) => {
    const buttons = words.map((word, n) =>
      h("button", { type: "button", class: "bar", "aria-pressed": String(n === 0) },
        h("span", { class: "word" }, word.token_str.trim()),
        bar(word.score),
        h("span", { class: "score" }, percent(word.score))));
    buttons.forEach((button, n) => button.addEventListener("click", () => {
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      slots[gap].textContent = words[n].token_str.trim();
    }));
    const name = gaps.length > 1 ? `Words for gap ${gap + 1}` : "Words";
    return h("section", { "aria-label": name },
      gaps.length > 1 ? h("h4", {}, `Gap ${gap + 1}`) : null,
      h("ol", { class: "bars" }, buttons.map((button) => h("li", {}, button))));
  });
  const gist = gaps.map((w) => `${w[0].token_str.trim()}, ${percent(w[0].score)}`).join("; ");
  return { nodes: [sentence, h("div", { class: gaps.length > 1 ? "gaps" : "" }, lists)], gist };
}

// -- Labels ----------------------------------------------------------------------------------------

/** Labels with scores, in each of the forms that pipelines have for them. */
function labelsOf(answer) {
  if (Array.isArray(answer?.labels)) {
    return answer.labels.map((label, i) => ({ label, score: answer.scores[i] }));
  }
  const list = (Array.isArray(answer) ? answer : [answer]).flat(2);
  return list.every((each) => typeof each?.score === "number") ? list : [];
}

function showLabels(info, sent, answer) {
  const labels = labelsOf(answer);
  if (!labels.length) return null;
  const rows = labels.map(({ label, score }) =>
    h("li", { class: "bar" }, h("span", { class: "word" }, String(label)), bar(score),
      h("span", { class: "score" }, percent(score))));
  const gist = `${labels[0].label}, ${percent(labels[0].score)}`;
  return { nodes: [h("ol", { class: "bars", "aria-label": "Labels" }, rows)], gist };
}

// -- Entities --------------------------------------------------------------------------------------

/** Parts that belong together: "B-PER" and the "I-PER" right after it, or pieces of one word. */
function entitiesOf(answer) {
  const entities = [];
  for (const part of answer) {
    const raw = String(part.entity_group ?? part.entity);
    const kind = raw.replace(/^[BIES]-/, "");
    const last = entities.at(-1);
    const goes = !part.entity_group && last?.kind === kind && !/^[BS]-/.test(raw);
    if (goes && part.start - last.end <= 1) {
      last.end = part.end;
      last.score = Math.min(last.score, part.score);
    } else if (last && part.start === last.end && String(part.word).startsWith("##")) {
      last.end = part.end;
    } else {
      entities.push({ kind, start: part.start, end: part.end, score: part.score });
    }
  }
  return entities;
}

function showEntities(info, sent, answer) {
  const list = answer.flat();
  if (!list.every((each) => typeof each.start === "number")) return null;
  const entities = entitiesOf(list);
  const text = Array.from(sent.inputs); // the pipeline counts characters, JavaScript halves of them
  const kinds = [...new Set(entities.map((entity) => entity.kind))];
  const sentence = h("p", { class: "sentence entities" });
  let end = 0;
  for (const { kind, start, end: stop } of entities) {
    sentence.append(text.slice(end, start).join(""));
    sentence.append(h("mark", { "data-kind": kinds.indexOf(kind) % 5 },
      text.slice(start, stop).join(""), h("small", {}, ` ${kind}`)));
    end = stop;
  }
  sentence.append(text.slice(end).join(""));
  const rows = entities.map(({ kind, start, end: stop, score }) =>
    h("li", { class: "bar" },
      h("span", { class: "word" }, text.slice(start, stop).join(""), h("small", {}, ` ${kind}`)),
      bar(score), h("span", { class: "score" }, percent(score))));
  const gist = plural(entities.length, "part") + " found";
  return {
    nodes: [sentence, rows.length ? h("ol", { class: "bars", "aria-label": "Found" }, rows)
      : h("p", { class: "muted" }, "Nothing was found in the text.")],
    gist,
  };
}

// -- Text ------------------------------------------------------------------------------------------

function showCompletion(info, sent, answer) {
  const text = answer?.text ?? answer?.[0]?.generated_text;
  if (typeof text !== "string") return null;
  const prompt = sent.text ?? String(sent.inputs);
  const goesOn = text.startsWith(prompt);
  const node = h("p", { class: "completion" },
    goesOn ? h("span", { class: "muted" }, prompt) : "", goesOn ? text.slice(prompt.length) : text);
  return { nodes: [node], gist: goesOn ? text.slice(prompt.length).trim() : text };
}

// -- Embeddings --------------------------------------------------------------------------------------

const SHOWN = 8;

function showEmbedding(info, sent, answer) {
  const vector = answer?.data?.[0]?.embedding;
  if (!Array.isArray(vector)) return null;
  const first = vector.slice(0, SHOWN).map((x) => x.toFixed(4).replace("-", "−"));
  const tokens = answer.usage?.prompt_tokens;
  const norm = Math.hypot(...vector);
  const gist = `${vector.length} dimensions`;
  const facts = [["Dimensions", vector.length], ["Norm", norm.toFixed(3)], ["Tokens", tokens ?? "–"]];
  return {
    nodes: [
      h("dl", { class: "facts" }, facts.map(([name, value]) =>
        h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
      fingerprint(vector),
      h("p", { class: "vector" }, `[${first.join(", ")}${vector.length > SHOWN ? ", …" : ""}]`),
    ],
    gist,
  };
}

/** One stroke per number, up or down from the middle. */
function fingerprint(vector) {
  const most = Math.max(...vector.map(Math.abs)) || 1;
  const picture = svg("svg", {
    class: "fingerprint", role: "img", viewBox: `0 0 ${vector.length} 2`, preserveAspectRatio: "none",
    "aria-label": `The ${vector.length} numbers as strokes`,
  });
  const strokes = vector.map((x, i) => `M${i + 0.5} 1v${(-x / most).toFixed(3)}`).join("");
  picture.append(svg("path", { d: strokes }));
  return picture;
}

function showRaw(info, sent, answer) {
  return { nodes: [jsonView(answer)], gist: "The answer is shown as JSON" };
}
