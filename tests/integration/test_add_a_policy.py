"""docs/how-to/add-an-eviction-policy.md: its policy, in a copy of the crate, compiles and passes the crate's tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pages
import pytest
from conformance.foreign import find
from pages import ROOT

PAGE = "docs/how-to/add-an-eviction-policy.md"
THIS = "tests/integration/test_add_a_policy.py"
TIMEOUT_S = 600


@pytest.mark.verify
def test_the_policy_of_the_page(tmp_path: Path) -> None:
    for program in ("cargo", "git"):
        find(program, for_what=PAGE)
    crate = tmp_path / "cachemgr/core"
    shutil.copytree(ROOT / "cachemgr/core", crate, ignore=shutil.ignore_patterns("target"))
    folder = crate / "src/cache/eviction"
    (folder / "reused.rs").write_text(pages.block(PAGE, test=THIS, language="rust").text)
    change = pages.block(PAGE, test=THIS, language="diff").text
    subprocess.run(["git", "apply", "-"], input=change, cwd=folder, text=True, check=True, timeout=TIMEOUT_S)
    assert "reused" in (folder / "policies.rs").read_text()
    command = pages.block(PAGE, test=THIS, language="").text
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "CARGO_TARGET_DIR": str(ROOT / "cachemgr/core/target")},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
