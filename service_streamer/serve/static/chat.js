// A chat with a model that has a template for chats: its turns, and the request for the next one.

import { h } from "./shared.js";

/** The endpoint of chats. */
export const CHAT = "v1/chat/completions";

const turns = []; // {role, content}: those that are complete

/** Begin anew. */
export const forgetChat = () => turns.splice(0);

export const hasTurns = () => turns.length > 0;

/** The request for the answer to a message: what was said before belongs to it. */
export function chatRequest(model, message, parameters, streams) {
  const messages = [...turns, { role: "user", content: message }];
  const stream = streams ? { stream: true, stream_options: { include_usage: true } } : {};
  return { model, messages, ...parameters, ...stream };
}

/** Keep a message and its answer for the next request. */
export function keepTurn(message, answer) {
  turns.push({ role: "user", content: message }, { role: "assistant", content: answer });
}

function turn(role, ...children) {
  const isUser = role === "user";
  return h("li", { class: isUser ? "turn user" : "turn" },
    h("h3", { class: "who" }, isUser ? "You" : "Model"), ...children);
}

/** What was said so far, then a message, and the node in which its answer appears. */
export function chatView(message, answer) {
  const said = turns.map(({ role, content }) => turn(role, h("p", { class: "completion" }, content)));
  return h("ol", { class: "chat" }, said, turn("user", h("p", { class: "completion" }, message)),
    turn("assistant", answer));
}
