"""The identity of a KV block's content: equal models fill a block with equal bytes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def fingerprint(model: Any) -> str:
    """Identify the content of a KV block by configuration, dtype and weights. Hex SHA-256, 64 characters.

    Of each weight it takes name, shape, dtype and one element of every row, at a column that changes from row to row;
    a buffer counts as a weight, so a pinned rope is part of it. Equal weights give equal fingerprints however they are
    cut into files; a checkpoint that differs only in elements not taken is not told apart. Reads about one element in
    a thousand, and waits for the device once per weight.
    """
    digest = hashlib.sha256(json.dumps(_lasting(model.config.to_dict()), sort_keys=True, default=str).encode())
    digest.update(f"{type(model).__name__} {model.dtype}".encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()


def _lasting(config: Any) -> Any:
    """The configuration without its origin, and without fields that the digest takes from the model itself."""
    if not isinstance(config, dict):
        return config
    passing = {"architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    return {str(k): _lasting(v) for k, v in config.items() if not str(k).startswith("_") and k not in passing}


def _sample(tensor: Tensor) -> bytes:
    """Return bytes of a tensor; of a sharded weight, bytes of this rank's part."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.numel() == 0:
        return b""
    rows = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.detach().reshape(-1, 1)
    columns = torch.arange(rows.shape[0], device=rows.device) * 2654435761 % rows.shape[1]
    if rows.is_floating_point() and rows.itemsize == 1:  # float8 has no gather()
        rows = rows.view(torch.uint8)
    taken = rows.gather(1, columns[:, None]).contiguous()
    return taken.view(torch.uint8).cpu().numpy().tobytes()
