"""Modules of a transformers model, replaced by fused ones where a trial shows the same numbers.

    fuse.py         finds the modules that can be fused, tries and swaps them
    trial.py        compares a replacement with the module's own forward
    modules.py      the replacements: norms, MLPs, attention, layers
    steps.py        their matrix products and the operations between them, in Triton or in torch
    activations.py  the activations of MLPs
    adapted_steps.py    the same, with updates of adapters behind their products
    products.py     products of few rows in kernels of our own
    fixed_products.py   all products in tiles that do not depend on the number of rows
    product_table.py    which of those are faster than the library's, by measurement
    projection.py   the weights of one product

A module that no replacement fits runs as it is.
"""
