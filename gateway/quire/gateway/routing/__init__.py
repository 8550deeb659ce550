"""Backends: a served model, behind which is one engine, or a router over the engines of several pools.

backend.py    the protocol Backend, and a single engine as one
router.py     one engine for each pool of a model, and the choice among them for each request
choosing.py   the cost of each pool for a request
"""
