"""Groups of layers that keep the same positions: each has a block table of its own, over one pool of equal blocks.

A layer with a window never reads a block behind it, and cachemgr gives such blocks up. So its layers must not lie in
one block with layers that read all positions. A block has room for L layers of one group, whichever it is:

    layers of the model     full: 10, window 1024: 52       Gemma 3 27B
    L = 5                   full: 5 5    window: 5 5 5 5 5 5 5 5 5 5 2
    a block                 [5 layers, 2, H, S, D], of any of the 13 groups

A small L leaves little room unused, and a large one needs few tables. L is the largest one with at most MAX_PADDING of
the bytes that a sequence holds at PADDING_TOKENS tokens unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.worker.memory.layer_spec import Causal, KeptPerToken, LayerSpec, Mask, Sliding

LayerGroupChoice = Literal["auto", "one"]
"""auto: layers with other windows have tables of their own; one: one table for all layers."""

MAX_GROUPS = 64
MAX_PADDING = 0.03
PADDING_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one mask. `layers` are their indexes in the model; layer i of them has place i of a block.

    mask is Causal where a window is as long as the longest sequence: it hides nothing.
    """

    mask: Mask
    layers: tuple[int, ...]

    @property
    def is_windowed(self) -> bool:
        """True if blocks behind a window are given up."""
        return not isinstance(self.mask, Causal)

    @property
    def window(self) -> int | None:
        """Tokens of the window or of a chunk; None if it reads all positions."""
        match self.mask:
            case Causal():
                return None
            case Sliding(window):
                return window
            case chunked:
                return chunked.chunk

    def count_passed(self, num_computed: int, block_size: int) -> int:
        """Return the number of blocks at the beginning of a sequence that no later token of it sees.

        The last computed token counts as a later one, because a fork or a trim computes it again.
        """
        return self.mask.first_visible(max(0, num_computed - 1)) // block_size

    def __str__(self) -> str:
        match self.mask:
            case Causal():
                return "full"
            case Sliding(window):
                return f"window {window}"
            case chunked:
                return f"chunk {chunked.chunk}"


LayerGroups = tuple[LayerGroup, ...]
"""The groups of a model, those that read all positions first."""


def group_layers(
    specs: Mapping[int, KeptPerToken], *, max_model_len: int, choice: LayerGroupChoice = "auto"
) -> LayerGroups:
    """Divide a model's layers, by index, into at most MAX_GROUPS groups.

    There is one group without a window, as with "one", if layers differ in heads or dims, or if their attention is not
    known, as that of a model with its own.
    """
    masks = {i: _mask_of(spec, max_model_len) for i, spec in sorted(specs.items()) if isinstance(spec, LayerSpec)}
    sizes = {(spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim, spec.values_in_keys) for spec in specs.values()}
    if choice == "one" or not specs or len(masks) < len(specs) or len(sizes) > 1:
        return one_group(specs)
    kinds = sorted(dict.fromkeys(masks.values()), key=lambda mask: not isinstance(mask, Causal))  # stable
    layers = [[i for i, mask in masks.items() if mask == kind] for kind in kinds]
    if len(kinds) > MAX_GROUPS:
        return one_group(specs)
    length = layers_per_block(
        [(len(each), LayerGroup(kind, ()).window) for kind, each in zip(kinds, layers, strict=True)],
        max_model_len=max_model_len,
    )
    return tuple(
        LayerGroup(kind, tuple(each[first : first + length]))
        for kind, each in zip(kinds, layers, strict=True)
        for first in range(0, len(each), length)
    )


def one_group(specs: Mapping[int, KeptPerToken]) -> LayerGroups:
    """Return one group of all layers, without a window."""
    return (LayerGroup(Causal(), tuple(sorted(specs))),)


def layers_per_block(kinds: Sequence[tuple[int, int | None]], *, max_model_len: int) -> int:
    """Choose the layers of a block for kinds of (layers, window, None for all positions); see the top of the file.

    If MAX_GROUPS groups always leave more room unused, the one that leaves least.
    """
    tokens = min(PADDING_TOKENS, max_model_len)
    held = [(count, tokens if window is None else min(tokens, window)) for count, window in kinds]
    needed = sum(count * kept for count, kept in held)

    def padding(length: int) -> float:
        return sum(-count % length * kept for count, kept in held) / needed

    lengths = [
        length
        for length in range(1, max(count for count, _ in held) + 1)
        if sum(-(-count // length) for count, _ in held) <= MAX_GROUPS
    ]
    fitting = [length for length in lengths if padding(length) <= MAX_PADDING]
    return max(fitting) if fitting else min(lengths, key=padding)


def specs_of_places(specs: Mapping[int, KeptPerToken], groups: LayerGroups) -> dict[int, KeptPerToken]:
    """Return the specs of a block's places. Layers of several groups with one place have equal sizes."""
    return {place: specs[layer] for group in groups for place, layer in enumerate(group.layers)}


def describe_groups(groups: LayerGroups, *, layer_bytes: int) -> str:
    """Return a line about the groups for people; layer_bytes is the size of one layer of a block."""
    if len(groups) == 1:
        return f"1 of {len(groups[0].layers)} layers, {groups[0]}"
    length = max(len(group.layers) for group in groups)
    kinds: dict[str, list[int]] = {}
    for group in groups:
        kinds.setdefault(str(group), []).append(len(group.layers))
    parts = [f"{kind}: {len(counts)} of {sum(counts)} layers" for kind, counts in kinds.items()]
    unused = Counter({kind: length * len(counts) - sum(counts) for kind, counts in kinds.items()})
    padded = [f"{count * layer_bytes} bytes in blocks of {kind}" for kind, count in (+unused).items()]
    return f"{len(groups)} of up to {length} layers ({'; '.join(parts)}); unused: {', '.join(padded) or 'none'}"


def _mask_of(spec: LayerSpec, max_model_len: int) -> Mask:
    window = LayerGroup(spec.mask, ()).window
    return Causal() if window is None or window >= max_model_len else spec.mask


def registers_groups(groups: LayerGroups) -> bool:
    """True if there are several groups, or one with a window."""
    return len(groups) > 1 or groups[0].is_windowed
