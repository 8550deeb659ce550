"""Modules of a transformers model, replaced by fused ones where a trial shows the same numbers.

    fuse.py         finds the modules that can be fused, tries and swaps them
    trial.py        compares a replacement with the module's own forward
    modules.py      the replacements: norms, MLPs, attention, layers
    steps.py        the operations between their matrix products, in Triton or in torch

A module that no replacement fits runs as it is.
"""
