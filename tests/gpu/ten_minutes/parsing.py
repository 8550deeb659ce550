"""Reads the command lines of a call's benchmarks, and runs none of them: python parsing.py CALL

Each is read by a fork of this process, which has imported torch: without that every one would take seconds. Exits with
1 if a script is not there, has no such flag, or refuses a flag's value.
"""

from __future__ import annotations

import runpy
import sys

import matplotlib.pyplot  # noqa: F401
import torch._dynamo  # noqa: F401
import transformers  # noqa: F401
from forks import succeeds
from parts import ROOT, Part, read_plan


def read(part: Part) -> None:
    """Import a benchmark as harness/run.py does, and let its command read the flags."""
    script, flags = ROOT / part.command[0], list(part.command[1:])
    sys.argv = [str(script), *flags]
    sys.path[:0] = [str(script.parent), str(ROOT / "benchmarks/harness")]
    runpy.run_path(str(script), run_name="read")["main"].make_context(script.name, flags)


def main() -> int:
    parts = [part for part in read_plan().calls[sys.argv[1]].parts if part.is_only_read]
    wrong = [part.name for part in parts if not succeeds(part.name, lambda part=part: read(part))]
    print(f"report: {len(parts) - len(wrong)} of {len(parts)} command lines are right", *wrong, flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
