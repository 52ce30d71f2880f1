// Line charts of the last two minutes, and bars; both of SVG.

import { h, svg } from "./dom.js";

export const WINDOW = 120; // seconds
const [HEIGHT, TOP, BOTTOM] = [140, 18, 20]; // pixels
const STEPS = [1, 2, 2.5, 5, 10];

/** The least round number that is not below a value. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * STEPS.find((step) => step * power >= value * (1 - 1e-9));
}

export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return String(Number(value.toFixed(value < 1 ? 2 : 1)));
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const at = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** at;
  return `${scaled < 10 && at ? scaled.toFixed(1) : Math.round(scaled)} ${units[at]}`;
}

const swatch = (index) => h("span", { class: `swatch c${index % 6}`, "aria-hidden": "true" });

/** A card with a chart. format: writes a value; limit: the top of the axis, or null for that of the values. */
export class LineChart {
  #rows = [];
  #names = [];

  constructor(title, { format = short, limit = null } = {}) {
    Object.assign(this, { title, format, limit });
    this.drawing = svg("svg", { role: "img", class: "lines", height: HEIGHT });
    this.legend = h("ul", { class: "legend" });
    this.node = h("section", { class: "card chart" }, h("h3", {}, title), this.legend, this.drawing);
    this.drawing.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.drawing.addEventListener("pointerleave", () => this.#point(null));
    new ResizeObserver(() => this.draw()).observe(this.drawing);
  }

  /** Adds the values of a time in seconds, by name; null: unknown. */
  add(seconds, values) {
    for (const name of Object.keys(values)) if (!this.#names.includes(name)) this.#names.push(name);
    this.#rows.push({ seconds, values });
    while (this.#rows[0].seconds < seconds - WINDOW) this.#rows.shift();
    this.draw();
  }

  /** A gap: the page did not look for a while. */
  pause() {
    if (this.#rows.length) this.#rows.push({ seconds: this.#rows.at(-1).seconds, values: {} });
  }

  #point(x) {
    this.pointed = x;
    this.draw();
  }

  draw() {
    const width = this.drawing.clientWidth;
    const last = this.#rows.at(-1);
    if (!width || !last) return;
    const values = this.#rows.flatMap((row) => Object.values(row.values)).filter((value) => value !== null);
    const top = this.limit ?? roundUp(Math.max(0, ...values));
    const x = (row) => width - ((last.seconds - row.seconds) / WINDOW) * width;
    const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
    const at = this.pointed == null ? last : this.#nearest(this.pointed, x);
    this.#showLegend(at);
    this.drawing.replaceChildren(
      ...[0, 0.5, 1].map((share) => svg("line", { class: "grid", x1: 0, x2: width, y1: y(share * top), y2: y(share * top) })),
      ...this.#names.flatMap((name, index) => this.#line(name, index, x, y)),
      ...[0.5, 1].map((share) => svg("text", { x: 2, y: y(share * top) - 3 }, this.format(share * top))),
      svg("text", { x: 2, y: HEIGHT - 5 }, "2 minutes ago"),
      svg("text", { x: width - 2, y: HEIGHT - 5, "text-anchor": "end" }, "now"),
      ...(this.pointed == null ? [] : [svg("line", { class: "pointer", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM })]),
    );
    this.drawing.setAttribute("aria-label", `${this.title}: ${this.#names.map((name) => `${name} ${this.#text(last, name)}`).join(", ")}`);
  }

  #nearest(pointed, x) {
    return this.#rows.reduce((best, row) => (Math.abs(x(row) - pointed) < Math.abs(x(best) - pointed) ? row : best));
  }

  #text(row, name) {
    const value = row.values[name] ?? null;
    return value === null ? "–" : this.format(value);
  }

  #showLegend(row) {
    this.legend.replaceChildren(...this.#names.map((name, index) => h("li", {}, swatch(index), h("b", {}, this.#text(row, name)), h("span", {}, name))));
  }

  #line(name, index, x, y) {
    const parts = [[]];
    for (const row of this.#rows) {
      const value = row.values[name] ?? null;
      if (value === null) parts.push([]);
      else parts.at(-1).push([x(row), y(value)]);
    }
    return parts.filter((part) => part.length).flatMap((part) => {
      if (part.length === 1) part.push(part[0]); // a dot
      const points = part.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" ");
      const area = `${part[0][0].toFixed(1)},${y(0)} ${points} ${part.at(-1)[0].toFixed(1)},${y(0)}`;
      return [svg("polygon", { class: `area c${index % 6}`, points: area }), svg("polyline", { class: `line c${index % 6}`, points })];
    });
  }
}

/** A bar of parts: [name, value] each, of a whole; with its legend. */
export function stackedBar(title, parts, whole, format) {
  const used = parts.reduce((total, [, value]) => total + value, 0);
  const full = Math.max(whole ?? 0, used) || 1;
  let at = 0;
  const pieces = parts.map(([, value], index) => {
    const piece = svg("rect", { class: `c${index % 6}`, x: `${(100 * at) / full}%`, width: `${(100 * value) / full}%`, height: 14 });
    at += value;
    return piece;
  });
  const total = whole ? `${format(used)} of ${format(whole)}` : format(used);
  return h("div", { class: "bars" },
    h("div", { class: "bars-head" }, h("b", {}, title), h("span", {}, total)),
    svg("svg", { class: "stack", height: 14, role: "img", "aria-label": `${title}: ${total}` }, pieces),
    h("ul", { class: "legend" }, parts.map(([name, value], index) => h("li", {}, swatch(index), h("b", {}, format(value)), h("span", {}, name)))));
}

/** Bars below one another: [name, value, text] each, as shares of the largest value or of a whole. */
export function bars(rows, whole = null) {
  const full = whole ?? (Math.max(...rows.map(([, value]) => value)) || 1);
  return h("dl", { class: "rows" }, rows.map(([name, value, text]) => {
    const bar = h("span", { class: "fill" });
    bar.style.width = `${(100 * value) / full}%`;
    return h("div", {}, h("dt", {}, name), h("dd", {}, h("span", { class: "track", "aria-hidden": "true" }, bar), h("b", {}, text)));
  }));
}
