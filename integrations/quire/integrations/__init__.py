"""Adapters for other projects. Each can be deleted together with its extra.

    kv_events/   `quire events`: changes of the prefix caches, as vLLM publishes them
    dynamo/      `quire dynamo`: a pool as a backend of NVIDIA Dynamo
    shepherd/    `quire serve --shepherd`: a pool as a worker of Shepherd Model Gateway

The last two use the copy of a pool's blocks in kv_events/.
"""
