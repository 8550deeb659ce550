"""A backend for NVIDIA Dynamo: its frontend and its router use a pool as they use an engine."""
