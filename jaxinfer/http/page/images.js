// Images: what a system of experts finds in them, or the label that an elastic task gives them.

import { getJson, postJson } from "./api.js";
import { bars } from "./charts.js";
import { $, h, icon } from "./dom.js";
import { errorBox } from "./errors.js";
import { say } from "./live.js";

const MOST_CLASSES = 8;
const AGAIN = 2000; // milliseconds
const canvas = h("canvas", { role: "img", "aria-label": "The image", hidden: true });
const file = h("input", { type: "file", accept: "image/*", class: "sr", id: "image-file" });
const drop = h("label", { class: "drop", for: "image-file" }, icon("image"), h("b", {}, "Choose an image"), h("span", {}, "or drop it here, or paste it"));
const stage = h("div", { class: "stage" }, canvas, file, drop);
const results = h("div", { class: "results", "aria-live": "polite" });
const target = h("select", { id: "image-target" });
const kind = h("select", { id: "image-kind" });
const latency = h("input", { type: "number", id: "image-latency", min: 0.001, step: "any", value: 1 });
const utility = h("input", { type: "number", id: "image-utility", min: 0, step: "any", value: 1 });
const field = (label, control) => h("div", { class: "number" }, h("label", { for: control.id }, label), control);
const ofExperts = h("div", {}, field("Kind of input", kind));
const ofTasks = h("div", {}, field("Latency in seconds", latency), field("Utility", utility));
const again = h("button", { type: "button", class: "primary", disabled: true, onclick: () => run() }, "Run again");

let targets = []; // of experts: {system}; of elastic tasks: {task}
let image = null; // {file, bitmap}
let running = null;

const chosen = () => targets[target.selectedIndex];

function showTarget() {
  const { system } = chosen();
  ofExperts.hidden = !system || system.inputs.length < 2;
  ofTasks.hidden = Boolean(system);
  kind.replaceChildren(...(system?.inputs ?? []).map((name) => h("option", {}, name)));
}

// --- the image ---

function drawImage(boxes = []) {
  const { bitmap } = image;
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  const pen = canvas.getContext("2d");
  pen.drawImage(bitmap, 0, 0);
  const shown = canvas.getBoundingClientRect().width || bitmap.width;
  boxes.forEach((box, index) => drawBox(pen, box, colour(index), bitmap.width / shown));
}

const colour = (index) => getComputedStyle(document.documentElement).getPropertyValue(`--c${index % 6}`);

/** unit: pixels of the image in one of the screen. */
function drawBox(pen, { label, score, box: [x0, y0, x1, y1] }, ink, unit) {
  const text = score === undefined ? label : `${label} ${Math.round(100 * score)}%`;
  pen.lineWidth = 2.5 * unit;
  pen.strokeStyle = pen.fillStyle = resolved(ink);
  pen.strokeRect(x0, y0, x1 - x0, y1 - y0);
  pen.font = `600 ${12 * unit}px system-ui, sans-serif`;
  const [width, height] = [pen.measureText(text).width + 10 * unit, 18 * unit];
  const top = Math.max(0, y0 - height);
  const left = Math.max(0, Math.min(x0 - pen.lineWidth / 2, pen.canvas.width - width));
  pen.fillRect(left, top, width, height);
  pen.fillStyle = "#fff";
  pen.textBaseline = "middle";
  pen.fillText(text, left + 5 * unit, top + height / 2);
}

/** A canvas knows no light-dark(): the colour that an element would have. */
function resolved(ink) {
  canvas.style.color = ink;
  return getComputedStyle(canvas).color;
}

async function take(given) {
  if (!given) return;
  results.replaceChildren();
  try {
    image = { file: given, bitmap: await createImageBitmap(given) };
  } catch {
    image = null;
    results.replaceChildren(errorBox(new Error(`${given.name || "The file"} is no image that this browser can read.`)));
    return;
  }
  canvas.hidden = false;
  drop.classList.add("small");
  again.disabled = false;
  canvas.setAttribute("aria-label", `The image ${given.name}`);
  drawImage();
  run();
}

// --- the answer ---

async function run() {
  running?.abort();
  const mine = (running = new AbortController());
  const { system, task } = chosen();
  const fields = system ? { model: system.id, kind: kind.value } : { model: task.model, task: task.id, latency: latency.value, utility: utility.value };
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) if (value !== "" && value !== undefined) form.append(name, value);
  form.append("image", image.file);
  results.classList.add("busy");
  drawImage();
  try {
    const [result] = (await postJson(system ? "v1/experts/infer" : "v1/elastic/query", form, mine.signal)).results;
    if (result.error) throw new Error(result.error.message);
    if (system) showStages(result);
    else showLabel(result);
  } catch (error) {
    if (error.name !== "AbortError") results.replaceChildren(errorBox(error, () => run()));
  }
  if (running === mine) results.classList.remove("busy");
}

const milliseconds = (seconds) => (seconds === undefined || seconds === null ? null : `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`);
const times = (of) => [of.queue_seconds !== undefined && `waited ${milliseconds(of.queue_seconds)}`, of.compute_seconds !== undefined && `computed ${milliseconds(of.compute_seconds)}`];

function showStages(result) {
  const stages = result.stages ?? [];
  drawImage(stages.flatMap((each) => each.boxes ?? []));
  let painted = 0;
  const items = stages.map((each) => h("li", {},
    h("div", { class: "stage-head" }, h("b", {}, each.expert), h("span", { class: "tag" }, each.verdict)),
    each.scores && bars(topOf(each.scores), 1),
    h("ul", { class: "legend" }, (each.boxes ?? []).map((box) => h("li", {}, h("span", { class: `swatch c${painted++ % 6}` }), h("span", {}, box.label), box.score !== undefined && h("b", {}, `${Math.round(100 * box.score)}%`)))),
    h("p", { class: "meta" }, [each.executor, each.batch !== undefined && `batch of ${each.batch}`, ...times(each)].filter(Boolean).join(" · "))));
  const total = milliseconds(result.seconds);
  results.replaceChildren(h("div", { class: "verdict" }, h("span", {}, "Verdict"), h("b", {}, result.verdict), total && h("span", { class: "meta" }, `after ${total}`)), h("ol", { class: "stages" }, items));
  say(`Verdict: ${result.verdict}`);
}

function topOf(scores) {
  const rows = Array.isArray(scores) ? scores.map((value, index) => [String(index), value]) : Object.entries(scores);
  return rows.sort(([, a], [, b]) => b - a).slice(0, MOST_CLASSES).map(([name, value]) => [name, value, `${(100 * value).toFixed(1)}%`]);
}

function showLabel(result) {
  const late = result.in_time === false && h("span", { class: "tag late" }, "late");
  const about = [result.level !== undefined && `level ${result.level}`, ...times(result)].filter(Boolean).join(" · ");
  results.replaceChildren(h("div", { class: "verdict" }, h("span", {}, "Label"), h("b", {}, result.label), late, h("span", { class: "meta" }, about)), result.probabilities && bars(topOf(result.probabilities), 1));
  say(`Label: ${result.label}`);
}

// --- the start ---

/** The server's lists of systems and of tasks. One that has no such endpoints says so in its description. */
async function lists() {
  const { paths } = await getJson("openapi.json");
  return Promise.all(["/v1/experts", "/v1/elastic/tasks"].map(async (path) => (path in paths ? (await getJson(path.slice(1))).data : [])));
}

function listen() {
  target.addEventListener("change", () => {
    showTarget();
    if (image) run();
  });
  file.addEventListener("change", () => {
    take(file.files[0]);
    file.value = "";
  });
  const panel = $("#images");
  panel.addEventListener("dragover", (event) => {
    event.preventDefault();
    stage.classList.add("over");
  });
  panel.addEventListener("dragleave", () => stage.classList.remove("over"));
  panel.addEventListener("drop", (event) => {
    event.preventDefault();
    stage.classList.remove("over");
    take(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => {
    const pasted = [...event.clipboardData.files].find((each) => each.type.startsWith("image/"));
    if (pasted && !panel.hidden) take(pasted);
  });
}

/** Looks for experts and elastic tasks; tells whether there are any. */
export async function startImages(there) {
  const [systems, tasks] = await lists();
  targets = [...systems.map((system) => ({ system })), ...tasks.map((task) => ({ task }))];
  there(targets.length > 0);
  if (systems.some(({ state }) => state === "loading")) setTimeout(() => startImages(there).catch(() => {}), AGAIN);
  if (!targets.length) return;
  const group = (label, options) => options.length > 0 && h("optgroup", { label }, options);
  const before = target.selectedIndex;
  target.replaceChildren(...[
    group("Experts", systems.map(({ id, state }) => h("option", {}, state === "loading" ? `${id} (loading)` : id))),
    group("Elastic tasks", tasks.map(({ id, model }) => h("option", {}, model ? `${id} (${model})` : id))),
  ].filter(Boolean));
  if (before >= 0 && before < targets.length) target.selectedIndex = before;
  showTarget();
  if ($("#images").childElementCount) return;
  $("#images").append(
    h("div", { class: "panel-head" }, h("h2", {}, "Images")),
    h("div", { class: "split" }, h("div", { class: "card" }, stage), h("div", { class: "card" }, field("Ask", target), ofExperts, ofTasks, h("div", { class: "row" }, again), results)));
  listen();
}
