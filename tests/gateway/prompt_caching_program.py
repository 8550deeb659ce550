"""Uses prompt caching with Anthropic's package: URL MODEL KEY."""

import sys

import anthropic

URL, MODEL, KEY = sys.argv[1:]
CONTROL = {"type": "ephemeral", "ttl": "1h"}
SYSTEM = [{"type": "text", "text": "Be brief and kind. " * 8, "cache_control": CONTROL}]
HELLO = [{"role": "user", "content": "Hello"}]

client = anthropic.Anthropic(base_url=URL, api_key=KEY, auth_token=None, max_retries=0)

warmed = client.messages.create(model=MODEL, max_tokens=0, messages=HELLO, system=SYSTEM)
assert warmed.content == []
assert warmed.usage.output_tokens == 0
created = warmed.usage.cache_creation
assert created.ephemeral_1h_input_tokens == warmed.usage.cache_creation_input_tokens > 0
assert created.ephemeral_5m_input_tokens == 0

first = client.messages.create(
    model=MODEL, max_tokens=4, messages=HELLO, system=SYSTEM, diagnostics={"previous_message_id": None}
)
assert first.diagnostics is None
assert first.usage.cache_read_input_tokens >= warmed.usage.cache_creation_input_tokens

asked = {"model": MODEL, "max_tokens": 4, "diagnostics": {"previous_message_id": first.id}}
other = [{"type": "text", "text": "Be long. " * 8}]
with client.messages.stream(messages=HELLO, system=other, **asked) as stream:
    changed = stream.get_final_message()
assert changed.diagnostics.cache_miss_reason.type == "system_changed"
assert changed.diagnostics.cache_miss_reason.cache_missed_input_tokens > 0

beta = client.beta.messages.create(
    messages=HELLO, system=SYSTEM, betas=["cache-diagnosis-2026-04-07"], cache_control={"type": "ephemeral"}, **asked
)
assert beta.diagnostics is None
assert beta.usage.cache_read_input_tokens > 0

print("done")
