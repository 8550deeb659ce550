"""Bounds of what a request says to the prefix cache, as the comments of cache_service.proto have them.

The client checks a request with them before it sends it. cachemgr checks what it gets with the same numbers in its
core; a test compares the two. No gRPC: any side may import this.
"""

MAX_SALT_BYTES = 64
ADAPTER_BYTES = 32
"""Of the identity of an adapter."""
MAX_ADAPTERS = 1_024
"""Of a pool."""
ADAPTER_NAME = "[A-Za-z0-9._:/-]{1,128}"
ADAPTER_NAME_LIMIT = "1 to 128 letters, digits, '.', '_', '-', ':' and '/'"
"""The same in words."""
MAX_RANGES = 16
"""Of an admission's retention."""
LEAST_PRIORITY, MOST_PRIORITY = 1, 9
"""Of a range."""
MAX_RETENTION_S = 86_400.0
MAX_BREAKPOINTS = 4
"""Of an admission."""
LEAST_KEEP_S, MAX_KEEP_S = 1.0, 86_400.0
"""The time for which a breakpoint keeps, after each use."""
MAX_EXPECTED_S = 86_400.0
"""Of a return hint."""
