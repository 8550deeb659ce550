"""OpenAI's endpoints: a JSON body becomes tokens and parameters, and chunks become a JSON answer or its events.

models.py          GET /v1/models, POST /tokenize and /detokenize
completions.py     POST /v1/completions
chat.py            POST /v1/chat/completions
responses.py       POST /v1/responses
conversations.py   the part that the last two share: a conversation's prompt, and its answer with tool calls
parameters.py      fields of a body: sampling, grammar, cache
answers.py         parts of an answer: usage, log-probabilities, ids of calls
"""
