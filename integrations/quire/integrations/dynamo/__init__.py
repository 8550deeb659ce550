"""A backend for NVIDIA Dynamo: its frontend and its router use a pool as they use an engine.

Dynamo                            quire dynamo
frontend: requests in tokens  ->  the engine of one pool
router: index of prefixes     <-  changes of the pool's blocks, from kv_events/

__main__.py   the process, and all that Quire knows of Dynamo
"""
