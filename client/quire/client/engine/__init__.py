"""Continuous batching over the two services: the loop, the scheduler and its policy, texts and metrics."""
