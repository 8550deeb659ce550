// A program of Vercel's AI SDK: URL MODEL. It fails if a text, a stream, structured output or a tool call is not whole.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const compatible = createOpenAICompatible({
  name: "quire",
  baseURL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = { compatible: compatible(model), chat: openai.chat(model), responses: openai(model) };
const cities = z.enum(["Rome", "Oslo"]);
const person = z.object({
  name: z.enum(["Ada", "Grace"]),
  isHere: z.boolean(),
  tag: z.object({ label: z.enum(["new", "old"]), score: z.number().int().min(0).max(100) }),
});
const weather = tool({
  description: "The weather.",
  inputSchema: z.object({ city: cities }),
  execute: async ({ city }) => `12 degrees in ${city}`,
});

for (const [name, chat] of Object.entries(models)) {
  const said = { model: chat, prompt: "Who is she?", temperature: 0, maxRetries: 0 };
  const failures = [];
  const onError = ({ error }) => failures.push(error);

  const text = await generateText({ ...said, maxOutputTokens: 8 });
  assert.ok(text.text, name);
  assert.equal(text.usage.outputTokens, 8, name);

  const stream = streamText({ ...said, maxOutputTokens: 8, onError });
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  assert.equal(streamed, text.text, name);
  assert.equal((await stream.usage).outputTokens, 8, name);

  const output = Output.object({ schema: person });
  const parsed = await generateText({ ...said, maxOutputTokens: 200, output });
  assert.ok(person.safeParse(parsed.output).success, name);
  const parts = streamText({ ...said, maxOutputTokens: 200, output, onError });
  assert.deepEqual(await parts.output, parsed.output, name);

  const tools = { tools: { weather }, toolChoice: { type: "tool", toolName: "weather" }, maxOutputTokens: 200 };
  const called = await generateText({ ...said, ...tools });
  assert.equal(called.toolCalls.length, 1, name);
  assert.equal(called.toolResults[0].output, `12 degrees in ${called.toolCalls[0].input.city}`, name);
  const calls = await streamText({ ...said, ...tools, onError }).toolCalls;
  assert.deepEqual(calls.map((each) => each.input), called.toolCalls.map((each) => each.input), name);

  const next = await generateText({
    ...said,
    maxOutputTokens: 8,
    tools: { weather },
    messages: [{ role: "user", content: "Who is she?" }, ...called.response.messages],
    prompt: undefined,
  });
  assert.ok(next.text || next.toolCalls.length, name);
  assert.deepEqual(failures, [], name);
}
console.log("done");
