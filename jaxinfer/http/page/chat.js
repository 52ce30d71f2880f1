// The chat: a conversation, and one request at a time.

import { stream } from "./api.js";
import { SettingError, settings, systemPrompt } from "./controls.js";
import { $, button, copy, h, icon } from "./dom.js";
import { errorBox, speed } from "./errors.js";
import { reader, say } from "./live.js";
import { models } from "./models.js";
import { textView } from "./text.js";

const NEAR_THE_END = 80; // pixels
const NO_TEMPLATE = /chat template \(chat_template\.jinja\)/;

/** The conversation: {message, node} each, where message is as the API takes it. */
const turns = [];
let running = null; // the AbortController of the request that runs
let toCompletion = () => {};

const log = $("#messages");
const input = $("#message");

// --- the view ---

function keepAtEnd(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_THE_END;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function add(message, node) {
  turns.push({ message, node });
  log.append(node);
  log.scrollTop = log.scrollHeight;
  showState();
}

/** Removes a turn and all after it. */
function removeFrom(node) {
  const from = turns.findIndex((turn) => turn.node === node);
  if (from >= 0) turns.splice(from);
  while (node.nextSibling) node.nextSibling.remove();
  node.remove();
  showState();
}

function clearError() {
  for (const box of log.querySelectorAll(":scope > .error")) box.remove();
}

function showState() {
  const send = $("#send");
  send.setAttribute("aria-label", running ? "Stop" : "Send");
  send.replaceChildren(icon(running ? "stop" : "send"));
  send.disabled = !running && !input.value.trim();
  log.classList.toggle("busy", running !== null);
  $("#chat").classList.toggle("empty", turns.length === 0);
  $("#new-chat").disabled = turns.length === 0;
}

function userNode(text) {
  const body = h("div", { class: "bubble" }, text);
  const node = h("article", { class: "turn user", "aria-label": "You" }, body);
  const edit = button("Edit", "edit", () => editIn(node, body, text));
  const copier = button("Copy", "copy", () => copy(text, copier));
  node.append(h("div", { class: "actions" }, edit, copier));
  return node;
}

function editIn(node, body, text) {
  if (running) return;
  const area = h("textarea", { "aria-label": "Edit the message", rows: Math.min(12, text.split("\n").length + 1) });
  area.value = text;
  const leave = () => {
    form.replaceWith(body);
    node.classList.remove("editing");
  };
  const send = () => {
    if (!area.value.trim()) return;
    removeFrom(node);
    ask(area.value);
  };
  const form = h("form", { class: "edit", onsubmit: (event) => {
    event.preventDefault();
    send();
  } }, area, h("div", { class: "row end" }, button("Cancel", null, leave), h("button", { class: "primary small" }, "Send")));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  node.classList.add("editing");
  body.replaceWith(form);
  area.focus();
}

function argumentsOf(call) {
  try {
    return JSON.stringify(JSON.parse(call.function.arguments), null, 2);
  } catch {
    return call.function.arguments;
  }
}

function callNode(call) {
  return h("div", { class: "call" },
    h("div", { class: "call-head" }, h("span", { class: "tag" }, "Tool call"), h("code", {}, call.function.name)),
    h("pre", { tabindex: "0" }, argumentsOf(call)));
}

/** The view of an answer: `show` follows its message, `end` closes it. */
function answerView(model) {
  const reasoned = h("div", { class: "reasoned" });
  const summary = h("summary", {}, "Thinking…");
  const reasoning = h("details", { class: "reasoning", open: true, hidden: true }, summary, reasoned);
  const content = h("div", { class: "content" });
  const calls = h("div", { class: "calls" });
  const meta = h("span", { class: "meta" }, model);
  const actions = h("div", { class: "actions" });
  const node = h("article", { class: "turn assistant growing", "aria-label": "Answer" }, reasoning, content, calls, h("div", { class: "foot" }, meta, actions));
  const [showContent, showReasoning] = [textView(content), textView(reasoned)];
  let thought = false;

  function closeReasoning(began) {
    thought = true;
    const seconds = (performance.now() - began) / 1000;
    summary.textContent = seconds < 0.1 ? "Thoughts" : `Thought for ${seconds.toFixed(1)} s`;
    reasoning.open = false;
  }

  return {
    node,
    show(message, began) {
      keepAtEnd(() => {
        reasoning.hidden = !message.reasoning_content;
        if (message.reasoning_content) showReasoning(message.reasoning_content);
        if (!thought && message.reasoning_content && (message.content || message.tool_calls)) closeReasoning(began);
        showContent(message.content ?? "");
        for (const call of (message.tool_calls ?? []).slice(calls.childElementCount)) calls.append(callNode(call));
      });
    },
    end(message, began, note) {
      if (message.reasoning_content && !thought) closeReasoning(began);
      const copier = button("Copy", "copy", () => copy(message.content ?? "", copier));
      const again = button("Again", "again", () => {
        if (running) return;
        removeFrom(node);
        answer();
      }, { title: "Answer again" });
      keepAtEnd(() => {
        node.classList.remove("growing");
        meta.textContent = note;
        if (message.content) actions.append(copier);
        actions.append(again);
      });
    },
  };
}

/** Asks for the results of calls; the conversation goes on once all are given. */
function resultsNode(calls) {
  const areas = calls.map((call, index) => h("textarea", { rows: 2, id: `result-${call.id}-${index}`, class: "mono", spellcheck: "false" }));
  const fields = calls.map((call, index) => h("label", { class: "field", for: areas[index].id }, h("span", {}, "Result of ", h("code", {}, call.function.name)), areas[index]));
  const node = h("form", { class: "turn results", onsubmit: (event) => {
    event.preventDefault();
    if (running) return;
    node.remove();
    calls.forEach((call, index) => {
      const message = { role: "tool", tool_call_id: call.id, name: call.function.name, content: areas[index].value };
      add(message, h("article", { class: "turn tool", "aria-label": `Result of ${call.function.name}` },
        h("span", { class: "tag" }, "Result"), h("pre", { tabindex: "0" }, message.content)));
    });
    answer();
  } }, fields, h("div", { class: "row end" }, h("button", { class: "primary small" }, calls.length > 1 ? "Send results" : "Send result")));
  for (const area of areas) {
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) node.requestSubmit();
    });
  }
  return node;
}

// --- the conversation ---

function take(message, delta) {
  const thinking = delta.reasoning_content ?? delta.reasoning;
  if (thinking) message.reasoning_content = (message.reasoning_content ?? "") + thinking;
  if (delta.content) message.content += delta.content;
  for (const { index, ...call } of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const known = message.tool_calls[index];
    if (known) known.function.arguments += call.function.arguments ?? "";
    else message.tool_calls[index ?? message.tool_calls.length] = call;
  }
}

function body() {
  const system = systemPrompt();
  const messages = turns.map(({ message }) => message);
  if (system) messages.unshift({ role: "system", content: system });
  return { model: models.chosen, messages, ...settings(true) };
}

const ENDS = { length: "ended at the limit of tokens", abort: "given up by the server", stopped: "stopped" };

function noteOf(model, usage, reason, times) {
  return [model, ENDS[reason], speed(usage, times.asked, times.first, times.last)].filter(Boolean).join(" · ");
}

/** Lets the model write the next message. */
async function answer() {
  clearError();
  let request;
  try {
    request = body();
  } catch (error) {
    if (error instanceof SettingError) return;
    throw error;
  }
  const [message, view, speak] = [{ role: "assistant", content: "" }, answerView(request.model), reader()];
  const times = { asked: performance.now() };
  let [usage, reason, frame] = [null, null, 0];
  const draw = () => {
    frame = 0;
    view.show(message, times.first);
  };
  running = new AbortController();
  add(message, view.node);
  say("The model is answering.");
  try {
    for await (const chunk of stream("v1/chat/completions", request, running.signal)) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      times.last = performance.now();
      times.first ??= times.last;
      take(message, choice.delta);
      reason = choice.finish_reason ?? reason;
      frame ||= requestAnimationFrame(draw);
      speak(message.content);
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else fail(error, message, view.node);
  }
  cancelAnimationFrame(frame);
  draw();
  view.end(message, times.first, noteOf(request.model, usage, reason, times));
  running = null;
  speak(message.content, true);
  showState();
  if (message.tool_calls && reason !== "stopped" && view.node.isConnected) {
    const results = resultsNode(message.tool_calls);
    keepAtEnd(() => log.append(results));
    $("textarea", results).focus({ preventScroll: true });
  }
}

/** Shows an error after what came before it. An answer that never began leaves nothing. */
function fail(error, message, node) {
  const begun = message.content || message.reasoning_content || message.tool_calls;
  if (!begun) removeFrom(node);
  const again = () => {
    if (running) return;
    if (begun) removeFrom(node);
    answer();
  };
  log.append(NO_TEMPLATE.test(error.message) ? noTemplateBox() : errorBox(error, again));
  log.scrollTop = log.scrollHeight;
}

function noTemplateBox() {
  const error = new Error(`${models.chosen} has no chat template, so it cannot chat. It can continue texts.`);
  const asked = turns.findLast(({ message }) => message.role === "user")?.message.content ?? "";
  return errorBox(error, null, button("Open in Completion", null, () => toCompletion(asked)));
}

function ask(text) {
  for (const form of log.querySelectorAll(":scope > .results")) form.remove();
  add({ role: "user", content: text }, userNode(text));
  answer();
}

function submit() {
  if (running) return running.abort();
  const text = input.value.trim();
  if (!text) return;
  input.value = "";
  input.dispatchEvent(new Event("input"));
  ask(text);
}

function startAgain() {
  running?.abort();
  turns.length = 0;
  log.replaceChildren();
  showState();
  input.focus();
}

/** openCompletion: shows a text in the other tab. */
export function startChat(openCompletion) {
  toCompletion = openCompletion;
  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  input.addEventListener("input", () => {
    input.parentNode.dataset.text = input.value;
    showState();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) submit();
    }
  });
  $("#chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("#new-chat").addEventListener("click", startAgain);
  showState();
}
