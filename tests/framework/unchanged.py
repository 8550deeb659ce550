"""Run a check, unless it passed before on the same files.

    python tests/framework/unchanged.py NAME [--without PREFIX]... [--with FILE]... -- COMMAND...

The key is a digest of the command, of the versions of Python and Rust, and of each file that git knows or would take,
without those below a prefix that is left out and do not go into the check. `--with` puts single files of such a prefix
back. A pass is kept in $XDG_CACHE_HOME/quire-ci, or ~/.cache/quire-ci, for a week: what comes from Debian and is of no
fixed version changes. The output says if a check was not run. QUIRE_RUN_ALL=1 runs every check.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT_S = 7 * 24 * 3600


def files_of(root: Path, without: list[str], put_back: list[str]) -> list[str]:
    """Return the names of the files that go into the check, in order."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listing, cwd=root, capture_output=True, check=True, text=True).stdout.split("\0")
    kept = {name for name in names if name and not name.startswith(tuple(without))} | {*put_back}
    return sorted(name for name in kept if (root / name).is_file())


def digest(root: Path, names: list[str], *words: str) -> str:
    """Return a digest of these words and of the names, modes and contents of these files."""
    total = hashlib.sha256(repr(words).encode())
    for name in names:
        content = hashlib.sha256((root / name).read_bytes()).hexdigest()
        total.update(repr((name, os.access(root / name, os.X_OK), content)).encode())
    return total.hexdigest()


def run_unless_passed(pass_file: Path, command: list[str]) -> int:
    """Return the exit status of the command, or 0 if the file of its last pass is there and new enough."""
    if os.environ.get("QUIRE_RUN_ALL") != "1" and pass_file.exists():
        age_s = time.time() - pass_file.stat().st_mtime
        if age_s < KEPT_S:
            print(f"*** {' '.join(command)}: NOT RUN, it passed {age_s / 3600:.1f} h ago on the same files ***")
            print(pass_file.read_text(), end="")
            return 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = []
        for line in process.stdout or ():
            print(line, end="", flush=True)
            said.append(line)
    skipped = not said  # a check that lacks its tools says so on stderr alone
    if process.returncode == 0 and not skipped:
        pass_file.parent.mkdir(parents=True, exist_ok=True)
        pass_file.write_text(f"    then: {said[-1]}")
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--with", action="append", default=[], dest="put_back")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    rust = subprocess.run(("rustc", "--version"), capture_output=True, text=True, check=True).stdout
    names = files_of(ROOT, given.without, [*given.put_back, str(Path(__file__).relative_to(ROOT))])
    key = digest(ROOT, names, *given.command, sys.version, rust, platform.platform())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire-ci"
    return run_unless_passed(cache / f"{given.name}-{key[:32]}", given.command)


if __name__ == "__main__":
    sys.exit(main())
