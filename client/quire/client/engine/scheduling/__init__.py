"""The scheduler: which sequences run in the next step, which wait, and which are preempted. Pure."""
