// The completion: a text that the user begins and the model continues, as often as both like.

import { stream } from "./api.js";
import { settings } from "./controls.js";
import { $, copy, h } from "./dom.js";
import { errorBox, speed } from "./errors.js";
import { reader, say } from "./live.js";
import { models } from "./models.js";

const DEFAULT_TOKENS = 128; // the server's own default, 16, is short for a reader

const area = $("#prompt");
const mirror = $(".mirror");
const meta = $("#completion-meta");
const earlier = []; // the texts before each continuation
let running = null;
let written = [0, 0]; // the part that the model wrote last

/** Shows the model's part in another colour: a copy of the text lies behind the field, and gives it its height. */
function follow() {
  const [from, to] = written;
  const text = area.value;
  mirror.replaceChildren(text.slice(0, from), h("mark", {}, text.slice(from, to)), `${text.slice(to)}\n`);
}

function showState() {
  $("#continue").textContent = running ? "Stop" : "Continue";
  $("#undo").disabled = running !== null || !earlier.length;
  area.readOnly = running !== null;
}

async function run() {
  const before = area.value;
  const request = { model: models.chosen, prompt: before, max_tokens: DEFAULT_TOKENS, ...settings(false) };
  const speak = reader();
  const times = { asked: performance.now() };
  let [text, usage, reason] = ["", null, null];
  running = new AbortController();
  $("#completion-error").replaceChildren();
  meta.textContent = "";
  showState();
  say("The model is writing.");
  try {
    for await (const chunk of stream("v1/completions", request, running.signal)) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      times.last = performance.now();
      times.first ??= times.last;
      reason = choice.finish_reason ?? reason;
      text += choice.text;
      show(before, text);
      speak(text);
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else $("#completion-error").replaceChildren(errorBox(error, () => running || run()));
  }
  if (text) earlier.push(before);
  running = null;
  showState();
  speak(text, true);
  const ends = { stop: "the model ended the text", stopped: "stopped" };
  meta.textContent = [ends[reason], speed(usage, times.asked, times.first, times.last)].filter(Boolean).join(" · ");
}

function show(before, text) {
  const editor = area.parentNode;
  const atEnd = editor.scrollHeight - editor.scrollTop - editor.clientHeight < 40;
  area.value = before + text;
  written = [before.length, area.value.length];
  follow();
  if (atEnd) editor.scrollTop = editor.scrollHeight;
}

function undo() {
  area.value = earlier.pop();
  written = [0, 0];
  meta.textContent = "";
  follow();
  showState();
  area.focus();
}

/** Shows a text, without asking for its continuation. */
export function openText(text) {
  if (running) return;
  area.value = text;
  written = [0, 0];
  follow();
  area.focus();
}

export function startCompletion() {
  const form = $("#completion-form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else run();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) run();
  });
  area.addEventListener("input", () => {
    written = [0, 0];
    follow();
  });
  $("#undo").addEventListener("click", undo);
  $("#copy-text").addEventListener("click", (event) => copy(area.value, event.currentTarget));
  follow();
  showState();
}
