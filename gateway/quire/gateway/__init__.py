"""The gateway: HTTP and gRPC for callers that need text and no leases, plans or steps."""
