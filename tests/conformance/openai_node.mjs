// What a user of npm's `openai` client does with a server: node openai_node.mjs URL MODEL. Fails by an exception.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [folder, url, model] = process.argv.slice(2);
const OpenAI = createRequire(`${folder}/package.json`)("openai").default;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const short = { model, max_tokens: 8, temperature: 0, ignore_eos: true };
const messages = [{ role: "user", content: "hi" }];

const whole = await client.chat.completions.create({ messages, ...short });
const text = whole.choices[0].message.content;
assert.equal(whole.usage.completion_tokens, 8);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ messages, stream: true, ...short })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);
assert.equal(await client.chat.completions.stream({ messages, ...short }).finalContent(), text);

const completion = await client.completions.create({ prompt: "ab", logprobs: 1, echo: true, ...short });
assert.equal(completion.choices[0].logprobs.tokens.length, 10);
assert.equal((await client.embeddings.create({ model, input: ["ab", "c"] })).data[1].embedding.length, 32);
const ids = [];
for await (const each of client.models.list()) ids.push(each.id);
assert.deepEqual(ids, [model]);

await assert.rejects(client.completions.create({ model, prompt: "a", temperature: -1 }), (error) => {
  assert(error instanceof OpenAI.BadRequestError);
  assert.deepEqual([error.status, error.param], [400, "temperature"]);
  return true;
});
await assert.rejects(client.chat.completions.create({ model: "none", messages }), OpenAI.NotFoundError);

const asked = { model, input: "hi", structured_outputs: { regex: "[a-z]{5}" }, temperature: 0 };
const response = await client.responses.create(asked);
assert.equal(response.output_text.length, 5);
const final = await client.responses.stream(asked).finalResponse();
assert.equal(final.output_text, response.output_text);
assert.equal((await client.responses.retrieve(final.id)).output[0].id, final.output[0].id);

const stream = await client.completions.create({ prompt: "a", stream: true, ...short, max_tokens: 900 });
for await (const chunk of stream) {
  assert.equal(chunk.model, model);
  stream.controller.abort();
  break;
}
console.log("ok");
