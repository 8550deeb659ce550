"""Chat: from the messages and tools of a body to a prompt, and from generated text to tool calls.

conversation.py   messages and tools, as bodies have them
json_schemas.py   schemas that are closed, and their white space
models.py         a model that chats: its template, and the format of its tool calls
templates.py      the template's text, and the processes that render it
rendering.py      the process that renders
tools.py          formats of tool calls, as grammars and as parsers
"""
