"""Fills the folder .peers with other engines' code that benchmarks on a GPU compare with; git ignores the folder.

    python benchmarks/harness/obtain_peers.py                     what is there, and what is not
    python benchmarks/harness/obtain_peers.py flashinfer          7.6 MB and 3 MB of wheels, into .peers/wheels
    python benchmarks/harness/obtain_peers.py vllm                its Triton kernel, out of a wheel of 400 MB

pip downloads wheels from the index that it is configured with. nano-vllm-triton is in no index: copy a clone of it to
.peers/nano-vllm-triton. Nothing of them is part of Quire. If a peer is not here, its row in the benchmark says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).parents[2] / ".peers"
WHEELS = ("flashinfer-python==0.6.2", "apache-tvm-ffi==0.1.6")
VLLM = "vllm==0.20.0"
VLLM_FILES = "vllm/v1/attention/ops/"
VLLM_KEPT = ("triton_unified_attention.py", "triton_attention_helpers.py", "triton_quant_kv/")
# Of the machine with the GPU: wheels for this one's Python may be others.
FOR = ("--python-version", "3.12", "--implementation", "cp")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer, the path in .peers that shows that it is there, and the benchmark that reads it."""

    name: str
    path: str
    benchmark: str

    def describe(self, folder: Path) -> str:
        found = next(iter(folder.glob(self.path)), None)
        where = f"here: {found.relative_to(folder.parent)}" if found else f"not here: {folder.name}/{self.path}"
        return f"{self.name:12} {where} (for {self.benchmark})"


KNOWN = (
    Peer("flashinfer", "wheels/flashinfer_python-*.whl", "quire bench kernels gpu"),
    Peer("vllm", "vllm/triton_unified_attention.py", "quire bench kernels gpu"),
    Peer("nano-vllm", "nano-vllm-triton/nanovllm", "quire bench step peers"),
)


def download(requirements: Sequence[str], folder: Path) -> None:
    """Download wheels without what they require. Raises CalledProcessError if pip fails."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", *FOR, *(word for each in PLATFORMS for word in ("--platform", each))]
    subprocess.run([*command, "--dest", str(folder), *requirements], check=True)


def take_vllm(wheel: Path, folder: Path) -> list[str]:
    """Copy the kernel and the files that it imports out of a wheel. Returns their names; none is there: ValueError."""
    taken = []
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            own = name.removeprefix(VLLM_FILES)
            if name.startswith(VLLM_FILES) and own.startswith(VLLM_KEPT) and own.endswith(".py"):
                target = folder / own
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(packed.read(name))
                taken.append(own)
    if VLLM_KEPT[0] not in taken:
        raise ValueError(f"{wheel.name} has no {VLLM_FILES}{VLLM_KEPT[0]}")
    return taken


def obtain(name: str, folder: Path) -> None:
    if name == "flashinfer":
        download(WHEELS, folder / "wheels")
        return
    with tempfile.TemporaryDirectory() as downloads:
        download([VLLM], Path(downloads))
        take_vllm(next(Path(downloads).glob("*.whl")), folder / "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=["flashinfer", "vllm", []], metavar="NAME")
    parser.add_argument("--folder", type=Path, default=PEERS)
    given = parser.parse_args()
    for name in given.names:
        obtain(name, given.folder)
    print("\n".join(peer.describe(given.folder) for peer in KNOWN))


if __name__ == "__main__":
    main()
