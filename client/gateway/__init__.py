"""The front door: HTTP and gRPC for callers who want text and know nothing of leases, plans and steps."""
