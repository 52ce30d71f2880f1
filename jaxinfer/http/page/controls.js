// The settings of chats and completions. An empty field leaves the choice to the model.

import { $, $$, h, icon, stored } from "./dom.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", about: "0: the likeliest token", min: 0, max: 2, step: 0.05, slider: true },
  { name: "top_p", label: "Top p", about: "share of probability kept", min: 0, max: 1, step: 0.01, slider: true },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];
const MORE = [
  { name: "top_k", label: "Top k", about: "tokens kept", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, step: 0.05 },
];
const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "weather",
      description: "Tells the weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/** A setting that cannot be sent. The field shows why. */
export class SettingError extends Error {}

function numberField({ name, label, about, slider, ...range }) {
  const input = h("input", { type: "number", name, id: `set-${name}`, placeholder: "default", inputmode: "decimal", ...range });
  const head = h("div", { class: "number" }, h("label", { for: input.id }, label, about && h("small", {}, about)), input);
  if (!slider) return head;
  const track = h("input", { type: "range", "aria-label": label, tabindex: "-1", ...range, class: "unset" });
  const follow = () => {
    track.classList.toggle("unset", input.value === "");
    track.value = input.value === "" ? (range.min + range.max) / 2 : input.value;
    track.style.setProperty("--at", `${(100 * (track.value - range.min)) / (range.max - range.min)}%`);
  };
  input.addEventListener("input", follow);
  track.addEventListener("input", () => {
    input.value = track.value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  });
  input.follow = follow;
  follow();
  return h("div", { class: "slid" }, head, track);
}

const area = (name, label, attributes) =>
  h("label", { class: "field" }, h("span", {}, label), h("textarea", { name, rows: 3, spellcheck: "false", ...attributes }));

const select = (name, label, options) =>
  h("div", { class: "number" }, h("label", { for: `set-${name}` }, label), h("select", { name, id: `set-${name}` }, options.map(([value, text]) => h("option", { value }, text))));

function build() {
  const example = h("button", { type: "button", class: "link", onclick: () => put("tools", JSON.stringify(EXAMPLE, null, 2)) }, "Insert an example");
  return h(
    "form",
    { id: "settings-form", autocomplete: "off" },
    h("div", { class: "settings-head" }, h("h2", {}, "Settings"), h("button", { type: "button", class: "link", onclick: reset }, "Reset"),
      h("button", { type: "button", class: "icon close", "aria-label": "Close settings" }, icon("close"))),
    h("div", { class: "only-chat" }, area("system", "System prompt", { placeholder: "You are a helpful assistant.", spellcheck: "true" })),
    h("fieldset", {}, h("legend", {}, "Sampling"), NUMBERS.map(numberField),
      area("stop", "Stop texts, one a line", { rows: 1 }),
      h("details", {}, h("summary", {}, "More"), MORE.map(numberField))),
    h("fieldset", { class: "only-chat" }, h("legend", {}, "Reasoning"),
      select("reasoning_effort", "Effort", [["", "default"], ["none", "none"], ["low", "low"], ["medium", "medium"], ["high", "high"]])),
    h("fieldset", { class: "only-chat" }, h("legend", {}, "Tools"),
      area("tools", "Functions as JSON", { rows: 5, class: "mono", placeholder: '[{"type": "function", …}]' }),
      h("p", { class: "problem", id: "tools-problem", role: "alert", hidden: true }), example,
      select("tool_choice", "Choice", [["", "default"], ["auto", "auto"], ["required", "required"], ["none", "none"]])),
  );
}

const form = build();
const fields = $$("[name]", form);

function put(name, value) {
  const field = $(`[name="${name}"]`, form);
  field.value = value;
  field.follow?.();
  save();
}

function save() {
  stored.set("settings", Object.fromEntries(fields.map((field) => [field.name, field.value])));
  $("#tools-problem", form).hidden = true;
}

function reset() {
  for (const field of fields) put(field.name, "");
}

/** The tools of the request. Takes a list or one, whole or only their functions. */
export function toolsOf(text) {
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new SettingError(`The tools are not JSON: ${error.message}`);
  }
  return [given].flat().map((tool, index) => {
    if (typeof (tool?.function ?? tool)?.name !== "string") throw new SettingError(`Tool ${index + 1} has no function with a name.`);
    return tool.function ? tool : { type: "function", function: tool };
  });
}

/** The fields of a request that the settings give. chat: with those of chats. Throws SettingError. */
export function settings(chat) {
  const value = (name) => $(`[name="${name}"]`, form).value;
  const given = {};
  for (const { name } of [...NUMBERS, ...MORE]) if (value(name) !== "") given[name] = Number(value(name));
  const stop = value("stop").split("\n").filter((line) => line !== "");
  if (stop.length) given.stop = stop;
  if (!chat) return given;
  if (value("reasoning_effort")) given.reasoning_effort = value("reasoning_effort");
  if (value("tools").trim()) {
    try {
      given.tools = toolsOf(value("tools"));
    } catch (error) {
      const problem = $("#tools-problem", form);
      problem.textContent = error.message;
      problem.hidden = false;
      openSettings(true);
      $('[name="tools"]', form).focus();
      throw error;
    }
    if (value("tool_choice")) given.tool_choice = value("tool_choice");
  }
  return given;
}

export const systemPrompt = () => $('[name="system"]', form).value.trim();

const narrow = matchMedia("(max-width: 900px)");
let opener = null;

/** Shows or hides the settings: a column where there is room, otherwise a sheet over the page. */
export function openSettings(open) {
  document.body.classList.toggle("settings-open", open);
  for (const each of $$(".settings-button")) each.setAttribute("aria-expanded", String(open));
  if (!narrow.matches) stored.set("settings-open", open);
  else if (open) $("button.close", form).focus();
  else opener?.focus();
}

export function startControls() {
  $("#settings").append(form);
  const kept = stored.get("settings") ?? {};
  for (const field of fields) {
    field.value = kept[field.name] ?? "";
    field.follow?.();
  }
  form.addEventListener("input", save);
  form.addEventListener("submit", (event) => event.preventDefault());
  const isOpen = () => document.body.classList.contains("settings-open");
  for (const each of $$(".settings-button")) {
    each.addEventListener("click", () => {
      opener = each;
      openSettings(!isOpen());
    });
  }
  $("button.close", form).addEventListener("click", () => openSettings(false));
  $("#backdrop").addEventListener("click", () => openSettings(false));
  $("#settings").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && narrow.matches) openSettings(false);
  });
  document.body.classList.toggle("settings-open", !narrow.matches && (stored.get("settings-open") ?? true));
  for (const each of $$(".settings-button")) each.setAttribute("aria-expanded", String(isOpen()));
}
