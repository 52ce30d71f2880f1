// The models of the server, and which one is chosen. All selects of models show the same.

import { ApiError, getJson } from "./api.js";
import { $$, h, stored } from "./dom.js";

const AGAIN = 2000; // milliseconds

export const models = new EventTarget();
models.list = [];
models.chosen = null;
models.loading = false;

const STATES = { loading: "loading", sleeping: "asleep", unloaded: "not loaded", failed: "failed" };
export const stateOf = (model) => model.state ?? "loaded";

function label(model) {
  const notes = [model.parent && `adapter of ${model.parent}`, STATES[stateOf(model)]].filter(Boolean);
  return notes.length ? `${model.id} (${notes.join(", ")})` : model.id;
}

function show() {
  for (const select of $$(".model-select")) {
    const options = models.list.map((model) => h("option", { value: model.id }, label(model)));
    select.replaceChildren(...(options.length ? options : [h("option", { value: "" }, models.loading ? "Loading…" : "No model")]));
    select.value = models.chosen ?? "";
    select.disabled = !options.length;
  }
}

export function choose(id) {
  models.chosen = id;
  stored.set("model", id);
  show();
}

let timer = null;

/** Reads the list; while the server loads models, again later. Throws as `request` does. */
export async function loadModels() {
  clearTimeout(timer);
  try {
    models.list = (await getJson("v1/models")).data;
    models.loading = false;
  } catch (error) {
    models.loading = error instanceof ApiError && error.status === 503;
    if (!models.loading) throw error;
  } finally {
    const known = new Set(models.list.map((model) => model.id));
    const wanted = [models.chosen, stored.get("model"), models.list[0]?.id];
    models.chosen = wanted.find((id) => known.has(id)) ?? null;
    show();
    models.dispatchEvent(new Event("change"));
  }
  if (models.loading || models.list.some((model) => stateOf(model) === "loading")) {
    timer = setTimeout(() => loadModels().catch(() => {}), AGAIN);
  }
}

for (const select of $$(".model-select")) select.addEventListener("change", () => choose(select.value));
