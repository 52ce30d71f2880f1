// Reads Prometheus' text format.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { n: "\n", '"': '"', "\\": "\\" };

function valueOf(text) {
  const infinite = text.match(/^([+-]?)Inf$/i);
  return infinite ? (infinite[1] === "-" ? -Infinity : Infinity) : Number(text);
}

/** The samples of a scrape, by the metric's name: {labels, value} each. Lines that are no samples are left out. */
export function parse(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    const sample = line.startsWith("#") ? null : line.match(SAMPLE);
    if (!sample) continue;
    const labels = {};
    for (const [, name, value] of (sample[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (whole, character) => ESCAPED[character] ?? whole);
    }
    if (!metrics.has(sample[1])) metrics.set(sample[1], []);
    metrics.get(sample[1]).push({ labels, value: valueOf(sample[3]) });
  }
  return metrics;
}

/** The sum of a metric's samples; null if it has none. */
export function sum(metrics, name) {
  const samples = metrics.get(name);
  return samples ? samples.reduce((total, sample) => total + sample.value, 0) : null;
}

/** The sums of a metric's samples by the value of a label, as a Map in the order of the scrape. */
export function sumBy(metrics, name, label) {
  const sums = new Map();
  for (const { labels, value } of metrics.get(name) ?? []) {
    const group = labels[label] ?? "";
    sums.set(group, (sums.get(group) ?? 0) + value);
  }
  return sums;
}

/** Returns a function that turns readings of counters into rates per second; null until it has two of them. */
export function rates() {
  const before = new Map();
  return (name, value, seconds) => {
    const last = before.get(name);
    before.set(name, { value, seconds });
    if (value === null || !last || last.value === null || seconds <= last.seconds) return null;
    return Math.max(0, value - last.value) / (seconds - last.seconds); // a server that began again counts from 0
  };
}
