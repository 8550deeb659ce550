"""OpenAI's endpoints: a JSON body becomes tokens and parameters, and chunks become a JSON answer or its events.

models.py          GET /v1/models, POST /tokenize and /detokenize
completions.py     POST /v1/completions
chat.py            POST /v1/chat/completions
responses.py       /v1/responses
response_items.py  items of its inputs, given and kept
response_tools.py  its tools
conversations.py   the part that chats, responses and Anthropic's messages share: a prompt, an answer with tool calls
parameters.py      fields of a body: sampling, grammar, cache
hints.py           fields of a body: advice on what is kept in the prefix cache
answers.py         parts of an answer: usage, log-probabilities, ids of calls
"""
