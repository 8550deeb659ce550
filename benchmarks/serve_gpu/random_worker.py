"""The worker, with random weights: the folder of its model has a configuration and no checkpoint."""

from __future__ import annotations

import sys
from typing import Any

from quire.worker.__main__ import main  # sets what torch must find in the environment

# isort: split
import torch
from transformers import AutoModelForCausalLM


def from_configuration(*_: Any, config: Any, dtype: torch.dtype, **__: Any) -> tuple[Any, dict[str, list[str]]]:
    """Make the model where it will run: 8 billion weights take minutes on a CPU."""
    torch.manual_seed(0)
    with torch.device(sys.argv[sys.argv.index("--device") + 1]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return model, {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}


if __name__ == "__main__":
    AutoModelForCausalLM.from_pretrained = from_configuration
    main()
