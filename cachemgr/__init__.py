"""cachemgr: decides who owns which KV block. See docs/architecture.md."""
