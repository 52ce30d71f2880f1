// An agent's loop by npm's client of Anthropic's API: node anthropic_node.mjs FOLDER URL MODEL. The model has a script.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [folder, url, model] = process.argv.slice(2);
const Anthropic = createRequire(`${folder}/package.json`)("@anthropic-ai/sdk").default;
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const tools = ["read", "write"].map((name) => ({
  name,
  input_schema: { type: "object", properties: { path: { type: "string" } }, required: ["path"] },
}));

async function run(ask) {
  const messages = [{ role: "user", content: "Go on." }];
  const called = [];
  while (true) {
    const message = await ask({ model, max_tokens: 200, tools, messages });
    const calls = message.content.filter((block) => block.type === "tool_use");
    if (calls.length === 0) {
      assert.equal(message.content.at(-1).text, "Done.");
      return called;
    }
    called.push(...calls.map((call) => `${call.name} ${call.input.path}`));
    const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "ok" }));
    messages.push({ role: "assistant", content: message.content }, { role: "user", content: results });
  }
}

const whole = await run((body) => client.messages.create(body));
assert.equal(whole.length, 12);
assert.deepEqual(await run((body) => client.messages.stream(body).finalMessage()), whole);
await assert.rejects(client.messages.create({ model, max_tokens: 1, messages: [] }), Anthropic.BadRequestError);
console.log("ok");
