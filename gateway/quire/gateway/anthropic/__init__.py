"""Anthropic's endpoints: a JSON body becomes tokens and parameters, and chunks become a message or its events.

messages.py        POST /v1/messages and /v1/messages/count_tokens
conversation.py    fields of a body: system, messages, tools
answers.py         a message and its events
errors.py          errors in Anthropic's shape
"""
