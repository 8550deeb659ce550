"""Backends: a served model, behind which is one engine, or a router over the engines of several pools.

backend.py    the protocol Backend, and a single engine as one
router.py     a model that several pools serve: chooses a pool for each request, and moves requests
failover.py   the chunks of one request, from one pool after another
members.py    the pools of a model, with an engine on each: they join and leave
choosing.py   the cost of each pool for a request
"""
