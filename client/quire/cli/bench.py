"""`quire bench`: runs one of the benchmarks of the checkout, which are not in the installed packages."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

NAMES = (
    "utilization",
    "sharing",
    "serving",
    "prefix",
    "routing",
    "door",
    "kernel",
    "step",
    "lab",
    "launches",
    "allocator",
    "control-plane",
    "scale",
    "restart",
    "pressure",
    "tensor-parallel",
    "peers",
)
_CHECKOUT = Path(__file__).resolve().parents[3]
_RESULTS = Path("build", "bench")
# Packages that the benchmarks need beside the services' own.
_NEEDED = ("matplotlib", "psutil", "rich")
_ENVIRONMENT = {
    # Two processes with OpenMP threads that spin while they wait take each other's cores.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
}


def list_benches() -> str:
    """Return the benchmarks' names and topics, a line each. Raises click.ClickException outside of a checkout."""
    folder = benchmarks_folder()
    width = max(map(len, NAMES))
    return "\n".join(f"{name:<{width}}  {_first_line(script_of(folder, name))}" for name in NAMES)


def run_bench(name: str, flags: Sequence[str], *, quick: bool, output: Path | None) -> NoReturn:
    """This process becomes the benchmark. Raises click.ClickException if it can't be run here."""
    benchmarks = benchmarks_folder()
    script = script_of(benchmarks, name)
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise click.ClickException(
            f"benchmarks need {', '.join(missing)}: run `make venv` in the checkout, or pip install -e '.[dev]'."
        )
    given = ["--quick", *flags] if quick else list(flags)
    folder = (output or benchmarks.parent / _RESULTS).absolute()
    sys.stdout.flush()
    os.environ.update({key: value for key, value in _ENVIRONMENT.items() if key not in os.environ})
    os.execv(sys.executable, [sys.executable, str(script), *given, "--output", str(folder)])


def benchmarks_folder() -> Path:
    """The checkout's folder of benchmarks. Raises click.ClickException if this is an installed package."""
    for root in (_CHECKOUT, Path.cwd()):
        if (root / "benchmarks" / "report.py").is_file():
            return root / "benchmarks"
    raise click.ClickException(
        "there are no benchmarks here: they are in a checkout, not in the installed package. Run `quire bench` there."
    )


def script_of(folder: Path, name: str) -> Path:
    """A module or a folder with a __main__. Raises click.BadParameter for an unknown name."""
    if name not in NAMES:
        raise click.BadParameter(f"{name!r} is none of: {', '.join(NAMES)}", param_hint="'NAME'")
    path = folder / name.replace("-", "_")
    return path if path.is_dir() else path.with_suffix(".py")


def _first_line(script: Path) -> str:
    """The first line of a benchmark's docstring, without running it."""
    with (script / "__main__.py" if script.is_dir() else script).open() as source:
        return source.readline().strip().removeprefix('"""').removesuffix('"""')
