"""Chat: from the messages and tools of a body to a prompt, and from generated text to reasoning, content and calls.

conversation.py   messages and tools, as bodies have them
json_schemas.py   schemas that are closed, and their white space
arguments.py      arguments of calls that come back
options.py        the operator's choices
models.py         a model that chats: its template, and the formats of its answers
templates.py      the template's text, and the processes that render it
rendering.py      the process that renders
content.py        special tokens' texts in what callers sent
tools/            formats of reasoning and calls, as grammars and as parsers
"""
