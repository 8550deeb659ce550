"""cachemgr: assigns KV blocks to sequences. See docs/architecture.md."""
