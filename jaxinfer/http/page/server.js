// The server's state, once a second while one can see it.

import { getJson } from "./api.js";
import { LineChart, bars, bytes, short, stackedBar } from "./charts.js";
import { $, h } from "./dom.js";
import { loadModels, models, stateOf } from "./models.js";
import { parse, rates, sum, sumBy } from "./prometheus.js";

const EACH = 1000; // milliseconds
const MODELS_EACH = 5; // polls
const SWITCHES = /^jaxinfer_experts?_\w*(switch|load|evict)\w*_total$/;
const LEVELS = /^jaxinfer_elastic_\w+_total$/;

const perSecond = (value) => `${short(value)}/s`;
const percent = (value) => `${Number((100 * value).toFixed(value < 0.1 ? 1 : 0))}%`;

const charts = {
  tokens: new LineChart("Tokens per second"),
  requests: new LineChart("Requests"),
  cache: new LineChart("KV cache in use", { format: percent, limit: 1 }),
  first: new LineChart("Time to first token", { format: (value) => `${short(value)} s` }),
  experts: new LineChart("Experts loaded and evicted", { format: perSecond }),
};
const memory = h("section", { class: "card", hidden: true }, h("h3", {}, "Memory"), h("div", {}));
const levels = h("section", { class: "card", hidden: true }, h("h3", {}, "Elastic answers by level"), h("div", {}));
const listed = h("section", { class: "card models" }, h("h3", {}, "Models"), h("ul", {}));
const problem = h("p", { class: "problem", hidden: true });
const version = h("span", { class: "meta" });

let rate = rates();
let firstToken = null; // seconds

function draw(metrics, seconds) {
  const perSecondOf = (name) => rate(name, sum(metrics, name), seconds);
  charts.tokens.add(seconds, { generated: perSecondOf("jaxinfer_generated_tokens_total"), prompt: perSecondOf("jaxinfer_prompt_tokens_total") });
  charts.requests.add(seconds, { running: sum(metrics, "jaxinfer_requests_running"), waiting: sum(metrics, "jaxinfer_requests_waiting") });
  const [used, pages] = [sum(metrics, "jaxinfer_kv_pages_used"), sum(metrics, "jaxinfer_kv_pages")];
  charts.cache.add(seconds, { used: pages ? used / pages : null });
  const [waited, count] = ["sum", "count"].map((part) => perSecondOf(`jaxinfer_time_to_first_token_seconds_${part}`));
  if (count) firstToken = waited / count;
  charts.first.add(seconds, { "of the latest answers": firstToken });
  drawExperts(metrics, seconds);
  drawMemory(metrics);
  drawLevels(metrics);
}

function drawExperts(metrics, seconds) {
  const names = [...metrics.keys()].filter((name) => SWITCHES.test(name));
  charts.experts.node.hidden = !names.length;
  const label = (name) => name.replace(/^jaxinfer_experts?_|_total$/g, "").replaceAll("_", " ");
  const values = names.map((name) => [label(name), rate(name, sum(metrics, name), seconds)]);
  if (names.length) charts.experts.add(seconds, Object.fromEntries(values));
}

function drawMemory(metrics) {
  const reserved = metrics.get("jaxinfer_memory_reserved_bytes") ?? [];
  const capacity = sumBy(metrics, "jaxinfer_memory_capacity_bytes", "memory");
  const names = new Set([...capacity.keys(), ...reserved.map(({ labels }) => labels.memory)]);
  memory.hidden = !names.size;
  $("div", memory).replaceChildren(...[...names].map((name) => {
    const parts = reserved.filter(({ labels, value }) => labels.memory === name && value > 0)
      .map(({ labels, value }) => [[labels.owner, labels.tenant].filter(Boolean).join(": "), value]);
    return stackedBar(name, parts, capacity.get(name), bytes);
  }));
}

function drawLevels(metrics) {
  const counts = new Map();
  for (const name of metrics.keys()) {
    if (!LEVELS.test(name)) continue;
    for (const [level, value] of sumBy(metrics, name, "level")) if (level) counts.set(level, (counts.get(level) ?? 0) + value);
  }
  levels.hidden = !counts.size;
  if (levels.hidden) return;
  const rows = [...counts].sort(([a], [b]) => a - b).map(([level, value]) => [level, value, short(value)]);
  $("div", levels).replaceChildren(bars(rows));
}

function drawModels() {
  $("ul", listed).replaceChildren(...models.list.map((model) => h("li", {},
    h("span", { class: `state ${stateOf(model)}`, "aria-hidden": "true" }),
    h("b", {}, model.id),
    h("span", { class: "meta" }, [model.parent && `adapter of ${model.parent}`, model.max_model_len && `context ${model.max_model_len.toLocaleString("en")}`].filter(Boolean).join(" · ")),
    h("span", { class: "tag" }, stateOf(model)))));
}

// --- polls ---

let shown = false; // the tab
let looking = false;
let polls = 0;

async function poll() {
  let metrics;
  try {
    const response = await fetch("metrics", { cache: "no-store" });
    if (!response.ok) throw new Error(response.statusText);
    metrics = parse(await response.text());
  } catch {
    pause();
    problem.textContent = "The server does not answer. Trying again…";
    problem.hidden = false;
    return;
  }
  problem.hidden = true;
  draw(metrics, performance.now() / 1000);
  if (polls++ % MODELS_EACH === 0) loadModels().catch(() => {});
}

async function look() {
  if (looking) return;
  looking = true;
  while (shown && document.visibilityState === "visible") {
    const next = performance.now() + EACH;
    await poll();
    await new Promise((resolve) => setTimeout(resolve, Math.max(0, next - performance.now())));
  }
  looking = false;
}

/** What happened while nobody looked is unknown. */
function pause() {
  rate = rates();
  for (const chart of Object.values(charts)) chart.pause();
}

/** Says whether the tab can be seen. */
export function watchServer(visible) {
  if (visible === shown) return;
  shown = visible;
  if (!visible) pause();
  look();
}

export function startServer() {
  const grid = h("div", { class: "cards" }, [charts.tokens, charts.requests, charts.cache, charts.first, charts.experts].map((chart) => chart.node), memory, levels, listed);
  charts.experts.node.hidden = true;
  $("#server").append(h("div", { class: "panel-head" }, h("h2", {}, "Server"), version), problem, grid);
  models.addEventListener("change", drawModels);
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "hidden") pause();
    look();
  });
  getJson("version").then((answer) => (version.textContent = `jaxinfer ${answer.version}`), () => {});
}
