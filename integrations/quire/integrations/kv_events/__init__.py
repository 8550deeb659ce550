"""Changes of the prefix caches, for routers that keep an index of them. `quire events` publishes them over ZMQ.

cachemgr                      quire events                          router
WatchBlocks: snapshot     ->  copy of the pool's findable blocks
and changes                   changes in order                  ->  index: which pool has which prefix

__main__.py    the process of `quire events`
follower.py    keeps the copy of one pool up to date, through outages and new epochs
layout.py      pure: which blocks of a prefix a prompt needs
replica.py     pure: the copy, which turns WatchBlocks into ordered changes
copies.py      pure: the same of the copies in the host tier and on the disk
encoding.py    changes as vLLM's KV events
publisher.py   sends them over ZMQ, and again to consumers that missed some
metrics.py     counters
"""
