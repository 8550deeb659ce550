"""Bounds of a lease's time to live, as the comments of cache_service.proto have them.

Clients check with them before they ask for a lease, and cachemgr checks what it gets. No gRPC: any side may import this.
"""

DEFAULT_TTL_S = 30.0
MIN_TTL_S, MAX_TTL_S = 1.0, 3600.0
