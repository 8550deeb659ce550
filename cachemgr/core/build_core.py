"""Builds the core of cachemgr with cargo, for a wheel and for an editable install: hatchling calls it."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

CRATE = Path("cachemgr", "core")
MODULE = Path("cachemgr", "quire", "cachemgr", "_core.abi3.so")
LIBRARIES = ("lib_core.so", "lib_core.dylib")


class CoreBuildHook(BuildHookInterface[Any]):
    """Adds the module to the package: beside its sources if the install is editable, else in the wheel alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and say what the wheel runs on. Raises subprocess.CalledProcessError if cargo fails."""
        root = Path(self.root)
        built = build(root / CRATE)
        if version == "editable":
            shutil.copy2(built, root / MODULE)
        else:
            build_data["force_include"][str(built)] = MODULE.relative_to("cachemgr").as_posix()
        platform = next(tag.platform for tag in sys_tags() if not tag.platform.startswith(("manylinux", "musllinux")))
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"


def build(crate: Path) -> Path:
    """Return the path of the built library."""
    command = ["cargo", "build", "--manifest-path", str(crate / "Cargo.toml"), "--locked", "--release"]
    # abi3 needs no Python to build. With one, cargo would build again for each environment of a build.
    subprocess.run(command, env={**os.environ, "PYO3_NO_PYTHON": "1"}, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", crate / "target"))
    return next(path for name in LIBRARIES if (path := target / "release" / name).exists())
