// The page's parsers, in Node.
import assert from "node:assert/strict";
import test from "node:test";

const page = "../../jaxinfer/http/page/";
const { EventParser, eventsOf } = await import(`${page}sse.js`);
const { parse, rates, sum, sumBy } = await import(`${page}prometheus.js`);
const { blocksOf } = await import(`${page}text.js`);
const { bytes, roundUp, short } = await import(`${page}charts.js`);

const EVENTS = 'data: {"a":"é🙂"}\r\n\r\n: comment\n\nevent: x\ndata: one\ndata:two\n\ndata\n\rdata: [DONE]\r\r';
const DATA = ['{"a":"é🙂"}', "one\ntwo", "", "[DONE]"];

async function read(size) {
  const content = new TextEncoder().encode(`${EVENTS}\n`);
  const stream = new ReadableStream({
    start(controller) {
      for (let at = 0; at < content.length; at += size) controller.enqueue(content.slice(at, at + size));
      controller.close();
    },
  });
  const found = [];
  for await (const event of eventsOf(stream)) found.push(event);
  return found;
}

test("events may be divided at any byte", async () => {
  for (const size of [1, 2, 3, 5, 1000]) assert.deepEqual(await read(size), DATA);
});

test("an event without its end is none", () => {
  assert.deepEqual(new EventParser().push("data: a\n"), []);
});

const METRICS = `# HELP a_total Text with } and " in it.
# TYPE a_total counter
a_total{model="x",by="q\\"uo\\\\te\\n}"} 3.0
a_total{model="y",by="z"} 4.5 1700000000000
bare 1e-3
bare_inf{le="+Inf"} +Inf
minus -Inf
nan NaN
broken{ 5
`;

test("samples have labels and values", () => {
  const metrics = parse(METRICS);
  assert.deepEqual(metrics.get("a_total")[0], { labels: { model: "x", by: 'q"uo\\te\n}' }, value: 3 });
  assert.equal(sum(metrics, "a_total"), 7.5);
  assert.equal(sum(metrics, "bare"), 0.001);
  assert.equal(sum(metrics, "minus"), -Infinity);
  assert.equal(metrics.get("bare_inf")[0].value, Infinity);
  assert.ok(Number.isNaN(metrics.get("nan")[0].value));
  assert.equal(sum(metrics, "none"), null);
  assert.equal(metrics.has("broken"), false);
  assert.deepEqual([...sumBy(metrics, "a_total", "model")], [["x", 3], ["y", 4.5]]);
});

test("counters become rates, also when the server begins again", () => {
  const rate = rates();
  assert.deepEqual([[10, 1], [30, 3], [5, 4], [null, 5], [9, 6], [10, 8]].map(([value, at]) => rate("a", value, at)), [null, 10, 0, null, null, 0.5]);
});

test("a text has blocks", () => {
  const text = "# Head\nOne\ntwo\n\n- a\n  - b\nmore\n3. c\n| x |\n|---|\n```py\n# no head\n\n``` no end\n```\nend";
  assert.deepEqual(blocksOf(text), [
    { kind: "heading", text: "Head" },
    { kind: "text", text: "One\ntwo" },
    { kind: "item", depth: 0, mark: "•", text: "a" },
    { kind: "item", depth: 1, mark: "•", text: "b\nmore" },
    { kind: "item", depth: 0, mark: "3.", text: "c" },
    { kind: "table", text: "| x |\n|---|" },
    { kind: "code", language: "py", text: "# no head\n\n``` no end" },
    { kind: "text", text: "end" },
  ]);
});

test("a fence that is open holds all that follows", () => {
  assert.deepEqual(blocksOf("~~~\n```\n<b>"), [{ kind: "code", language: "", text: "```\n<b>" }]);
});

test("a text that grows keeps its blocks, but the last", () => {
  const text = "One\n\n- two\n\n```js\nthree\n```\nfour **five** `six`";
  for (let end = 1; end < text.length; end++) {
    const [before, after] = [blocksOf(text.slice(0, end)), blocksOf(text.slice(0, end + 1))];
    assert.deepEqual(after.slice(0, before.length - 1), before.slice(0, -1));
  }
});

test("numbers are short", () => {
  assert.deepEqual([0, 0.5, 3.14159, 250.4, 12345, 2.5e6].map(short), ["0", "0.5", "3.1", "250", "12.3k", "2.5M"]);
  assert.deepEqual([0, 1023, 1536, 1 << 30].map(bytes), ["0 B", "1023 B", "1.5 KiB", "1.0 GiB"]);
  assert.deepEqual([0, 0.3, 1, 7, 23, 250, 900].map(roundUp), [1, 0.5, 1, 10, 25, 250, 1000]);
});
