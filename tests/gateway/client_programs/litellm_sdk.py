"""A program of LiteLLM's package: URL MODEL. It fails if an answer, a stream or a call of a tool is not whole."""

import json
import sys

import litellm

URL, MODEL = sys.argv[1:]
FIELDS = {"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 200, "temperature": 0, "seed": 3, "num_retries": 0}
CHAT = {"model": f"hosted_vllm/{MODEL}", "messages": [{"role": "user", "content": "The weather?"}], **FIELDS}
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PLACE}}
CHOICE = {"type": "function", "function": {"name": "weather"}}

for provider in ("openai", "hosted_vllm"):
    said = litellm.completion(**CHAT | {"model": f"{provider}/{MODEL}", "max_tokens": 8})
    assert said.choices[0].message.content
    assert said.usage.completion_tokens == 8

chunks = list(litellm.completion(**CHAT | {"max_tokens": 8}, stream=True, stream_options={"include_usage": True}))
whole = litellm.stream_chunk_builder(chunks)
assert whole.choices[0].message.content
assert whole.usage.completion_tokens == 8

text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Once", **FIELDS | {"max_tokens": 8})
assert text.choices[0].text

schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
assert json.loads(litellm.completion(**CHAT, response_format=schema).choices[0].message.content)["city"]

for stream in (False, True):
    called = litellm.completion(**CHAT, tools=[TOOL], tool_choice=CHOICE, stream=stream)
    answer = litellm.stream_chunk_builder(list(called)) if stream else called
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")) == ("weather", True)

try:
    litellm.completion(**CHAT | {"model": "openai/other"})
except litellm.NotFoundError:
    print("done")
