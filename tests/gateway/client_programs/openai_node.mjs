// A program of OpenAI's package for Node: URL MODEL. It fails if an answer, a stream, structured output or a tool call is not whole.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Who is she?" }];
const chat = { model, messages, temperature: 0, seed: 3 };

assert.deepEqual((await client.models.list()).data.map((each) => each.id), [model]);
const said = await client.chat.completions.create({ ...chat, max_tokens: 8 });
let streamed = "";
const stream = await client.chat.completions.create({ ...chat, max_tokens: 8, stream: true });
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
assert.ok(streamed);
assert.equal(streamed, said.choices[0].message.content);
assert.ok((await client.completions.create({ model, prompt: "Once", max_tokens: 8 })).choices[0].text);

const person = z.object({ name: z.enum(["Ada", "Grace"]), isHere: z.boolean() });
const format = zodResponseFormat(person, "person");
const parsed = await client.chat.completions.parse({ ...chat, max_tokens: 200, response_format: format });
assert.ok(person.safeParse(parsed.choices[0].message.parsed).success);

const parameters = { type: "object", properties: { city: { enum: ["Rome", "Oslo"] } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];
const choice = { type: "function", function: { name: "weather" } };
const asked = { ...chat, max_tokens: 200, tools, tool_choice: choice };
const called = await client.chat.completions.stream(asked).finalChatCompletion();
const [call] = called.choices[0].message.tool_calls;
assert.ok(["Rome", "Oslo"].includes(JSON.parse(call.function.arguments).city));
const result = { role: "tool", tool_call_id: call.id, content: "12 degrees" };
const next = [...messages, called.choices[0].message, result];
assert.ok((await client.chat.completions.create({ ...chat, messages: next, max_tokens: 8, tools })).choices[0].message);

const response = await client.responses.create({ model, input: "Who is she?", max_output_tokens: 8 });
assert.ok(response.output_text);
await assert.rejects(client.chat.completions.create({ ...chat, model: "other" }), OpenAI.NotFoundError);
console.log("done");
