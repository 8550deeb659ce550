"""The Go client and its examples: `go vet`, formatting, and `go test -race` against the two real services."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.foreign import BUILD_TIMEOUT_S, ROOT, find, missing

MODULE = ROOT / "client/go"


def run(*command: str) -> str:
    """What a command in the module says; all of it is shown if it fails."""
    environment = {**os.environ, "QUIRE_PYTHON": sys.executable, "QUIRE_ROOT": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=MODULE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}"
    return done.stdout


@pytest.fixture(scope="module")
def go() -> str:
    return find("go", for_what="the Go client")


def test_the_code_is_formatted_and_sound(go: str) -> None:
    gofmt = Path(go).resolve().with_name("gofmt")
    files = [str(path) for path in sorted(MODULE.rglob("*.go"))]
    assert run(str(gofmt), "-l", *files) == ""
    run(go, "vet", "./...")


def test_its_tests_pass_with_the_race_detector(go: str) -> None:
    compiler = run(go, "env", "CC").strip()
    if run(go, "env", "CGO_ENABLED").strip() != "1" or not any(map(os.path.exists, candidates(compiler))):
        missing(f"the C compiler ({compiler})", for_what="the Go client with the race detector, which needs cgo,")
    said = run(go, "test", "-race", "-count=1", "-timeout=5m", "-v", "./...")
    assert "--- SKIP" not in said, "a test was skipped although everything is there"


def candidates(program: str) -> list[str]:
    return [os.path.join(folder, program) for folder in os.get_exec_path()]
