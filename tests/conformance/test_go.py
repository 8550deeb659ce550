"""The Go client and its examples: `go vet`, formatting, `go test -race` against the two real services, and the lines
of client/go/README.md that use it from a checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.foreign import BUILD_TIMEOUT_S, ROOT, find, missing

MODULE = ROOT / "client/go"


def run(*command: str, cwd: Path = MODULE) -> str:
    """Return the output of a command in the module or in another folder; all of it is shown if it fails."""
    environment = {**os.environ, "QUIRE_PYTHON": sys.executable, "QUIRE_ROOT": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=cwd,
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


def test_another_module_uses_it_from_a_checkout_as_the_readme_says(go: str, tmp_path: Path) -> None:
    """Only the checkout's folder is inserted into the README's lines."""
    lines = re.search(r"```\n(go mod edit .*?)```", (MODULE / "README.md").read_text(), re.DOTALL)
    assert lines is not None
    (tmp_path / "main.go").write_text(
        'package main\n\nimport "github.com/quire-kv/quire/client/go/quire"\n\n'
        'func main() {\n\tif _, err := quire.Dial("unix:/nowhere"); err != nil {\n\t\tpanic(err)\n\t}\n}\n'
    )
    run(go, "mod", "init", "example.com/consumer", cwd=tmp_path)
    for line in lines[1].replace("CHECKOUT", str(ROOT)).splitlines():
        run(go, *line.split()[1:], cwd=tmp_path)
    run(go, "build", "-o", str(tmp_path / "consumer"), ".", cwd=tmp_path)


def candidates(program: str) -> list[str]:
    return [os.path.join(folder, program) for folder in os.get_exec_path()]
