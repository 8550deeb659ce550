"""EngineService: text over gRPC, with the same gateway behind it as HTTP has.

service.py    the calls: each decodes, generates, encodes
messages.py   messages to parameters, and chunks to messages
errors.py     reasons of refusals, and their statuses
"""
