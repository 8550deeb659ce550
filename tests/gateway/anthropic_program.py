"""A program of Anthropic's package, run by test_messages.py in an environment of its own: URL MODEL KEY KEY_OF_BOB.

Bob may use one token a minute.

It fails if an answer, a stream, a round trip of a tool or an error is not as the package's types say.
"""

import sys

import anthropic
from anthropic.types import TextBlock, ToolUseBlock

URL, MODEL, KEY, KEY_OF_BOB = sys.argv[1:]
TOOL = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def must_raise(kind: type[anthropic.APIStatusError], client: anthropic.Anthropic, **fields: object) -> None:
    """Fail unless a request raises this error, and the package has read its type and request id."""
    found = None
    try:
        client.messages.create(**{"model": MODEL, "max_tokens": 4, "messages": HELLO, **fields})
    except kind as error:
        found = error
    assert type(found) is kind
    assert all((found.type, found.api_message, found.request_id)), found.body


HELLO = [{"role": "user", "content": "Hello"}]
client = anthropic.Anthropic(base_url=URL, api_key=KEY, auth_token=None, max_retries=0)

message = client.messages.create(model=MODEL, max_tokens=8, messages=HELLO, system="Be brief.")
assert isinstance(message.content[0], TextBlock)
assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
assert message._request_id

with client.messages.stream(model=MODEL, max_tokens=8, messages=HELLO) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert final.content[0].text == text
assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)

asked = {"model": MODEL, "max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
with client.messages.stream(messages=HELLO, **asked) as stream:
    called = stream.get_final_message()
(call,) = called.content
assert isinstance(call, ToolUseBlock)
assert call.input["city"] in ("Rome", "Oslo")
assert called.stop_reason == "tool_use"
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12 degrees"}]}
messages = [*HELLO, called.to_param(), {"role": "user", "content": [result]}]
assert client.messages.create(model=MODEL, max_tokens=4, messages=messages, tools=[TOOL]).content

counted = client.messages.count_tokens(model=MODEL, messages=HELLO, tools=[TOOL], system="Be brief.")
assert counted.input_tokens > client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens

beta = client.beta.messages.create(
    model=MODEL, max_tokens=4, messages=HELLO, betas=["context-management-2025-06-27"], metadata={"user_id": "u"}
)
assert beta.content
assert [each.id for each in client.models.list()] == [MODEL]
assert client.models.retrieve(MODEL).display_name == MODEL

must_raise(anthropic.BadRequestError, client, max_tokens=-1)
must_raise(anthropic.NotFoundError, client, model="other")
large = [{"role": "user", "content": "x" * (2 * 2**20)}]
must_raise(anthropic.RequestTooLargeError, client, messages=large)
limited = anthropic.Anthropic(base_url=URL, api_key=KEY_OF_BOB, max_retries=0)
assert limited.messages.create(model=MODEL, max_tokens=4, messages=HELLO).content
must_raise(anthropic.RateLimitError, limited)
must_raise(anthropic.AuthenticationError, anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0))
must_raise(
    anthropic.PermissionDeniedError, anthropic.Anthropic(base_url=URL, auth_token="key-of-watcher", max_retries=0)
)
print("done")
