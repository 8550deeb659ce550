"""A cache of Triton's that was made elsewhere: smaller to carry, and found where it lies now.

The hash by which Triton finds a kernel has no path in it. But beside each kernel a file __grp__NAME.json has the paths
of its files, and a kernel without its files at these paths is compiled again.
"""

from __future__ import annotations

import json
from pathlib import Path

CARRIED = (".json", ".cubin", ".so")
"""The needs of a launch: metadata and machine code of kernels, and the modules in C that launch them."""


def leave_out_texts(folder: Path) -> None:
    """Delete what Triton keeps for people: the kernel in four languages, three quarters of the bytes."""
    for path in folder.glob("*/*"):
        if path.suffix not in CARRIED:
            path.unlink()


def settle(folder: Path) -> None:
    """Write where each kernel's files are now. Raises ValueError if the folder holds no kernels."""
    groups = list(folder.glob("*/__grp__*.json"))
    if not groups:
        raise ValueError(f"{folder} is no cache of Triton: make one with --compile")
    for group in groups:
        names = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent.resolve() / name) for name in names}}))


def described(folder: Path) -> str:
    """Return the number of kernels, of modules in C, and the bytes."""
    kernels, modules = (sum(1 for _ in folder.glob(f"*/*{ending}")) for ending in (".cubin", ".so"))
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{kernels} kernels and {modules} modules in C, {num_bytes / 2**20:.1f} MiB in {folder}"
