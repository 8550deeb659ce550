"""The same bits for a row whatever else is in the step: tiles that depend on no number of rows.

A kernel adds in the order of its tile and splits. Launchers choose these by the number of rows and sequences, so
a row's bits differ between a step of one sequence and one of many. With fixed tiles they depend on a layer's sizes and
on the GPU alone:

    paged_prefill       a tile of 64 rows (16 in float32), keys in one part, and one loop for masked keys and others.
                        Sequences with one query take it too, so that a token has the same bits decoded and in a prompt
    fixed_linear        the matrix product of any number of rows
    qkv_prologue        4 tokens of a head in a program: the norm adds up in the order of the program's threads
    norms, rope, activations, the sampler: row by row in any case

Within a tile each row is computed from its own operands, in the order of its keys or inputs, which begin at multiples
of the tile. Keys that a row does not see, but another row of its tile does, add zeros.
"""

from __future__ import annotations

from quire.kernels.launching import forget_prepared

_are_used = False


def use_fixed_tiles(are_used: bool) -> None:
    """Use fixed tiles from now on, or no longer. Graphs that were captured before stay as they are."""
    global _are_used
    _are_used = are_used
    forget_prepared()


def are_fixed_tiles_used() -> bool:
    """True after use_fixed_tiles(True)."""
    return _are_used
