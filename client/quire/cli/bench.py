"""`quire bench`: runs one of the benchmarks of the checkout, which are not in the installed packages."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

# The benchmarks, and the parts of each that run only by their own name.
PARTS: dict[str, tuple[str, ...]] = {
    "utilization": ("sharing",),
    "serving": ("peers", "door"),
    "prefix": ("windows", "queued-prompts"),
    "prompt-cache": (),
    "routing": (),
    "kernels": ("launches", "gpu", "products", "rates", "chains"),
    "step": ("draws", "grammars", "prompts", "slow-grammar", "peers"),
    "serve-gpu": (),
    "lab": (),
    "allocator": ("schedulers",),
    "control-plane": ("restart", "kept-memory", "kv-events", "worker", "profiles"),
    "scale": (),
    "pressure": (),
    "tiers": (),
    "tensor-parallel": (),
    "start": (),
    "pipeline": (),
    "drafts": (),
    "lora": (),
}
_CHECKOUT = Path(__file__).resolve().parents[3]
_RESULTS = Path("build", "bench")
# The program that runs a script, beside the code that several scripts import.
_RUN = Path("harness", "run.py")
# Packages that the benchmarks need beside the services' own.
_NEEDED = ("matplotlib", "psutil", "rich")
_ENVIRONMENT = {
    # Two processes with OpenMP threads that spin while they wait take each other's cores.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
}


def list_benches() -> str:
    """Return all benchmarks with their topics, a line each. Raises click.ClickException outside of a checkout."""
    folder = benchmarks_folder()
    scripts = {
        f"{name} {part}".strip(): script_of(folder, name, part)
        for name, parts in PARTS.items()
        for part in ("", *parts)
    }
    width = max(map(len, scripts))
    return "\n".join(f"{name:<{width}}  {_first_line(script)}" for name, script in scripts.items())


def run_bench(name: str, flags: Sequence[str], *, quick: bool, output: Path | None) -> NoReturn:
    """This process becomes the benchmark, or the part of it that the first of `flags` names.

    Raises click.ClickException if it can't be run here.
    """
    benchmarks = benchmarks_folder()
    part, own = ("", flags) if not flags or flags[0].startswith("-") else (flags[0], flags[1:])
    script = script_of(benchmarks, name, part)
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise click.ClickException(
            f"benchmarks need {', '.join(missing)}: run `make venv` in the checkout, or pip install -e '.[dev]'."
        )
    given = ["--quick", *own] if quick else list(own)
    folder = (output or benchmarks.parent / _RESULTS).absolute()
    sys.stdout.flush()
    os.environ.update({key: value for key, value in _ENVIRONMENT.items() if key not in os.environ})
    os.execv(sys.executable, [sys.executable, str(benchmarks / _RUN), str(script), *given, "--output", str(folder)])


def benchmarks_folder() -> Path:
    """The checkout's folder of benchmarks. Raises click.ClickException if this is an installed package."""
    for root in (_CHECKOUT, Path.cwd()):
        if (root / "benchmarks" / _RUN).is_file():
            return root / "benchmarks"
    raise click.ClickException(
        "there are no benchmarks here: they are in a checkout, not in the installed package. Run `quire bench` there."
    )


def script_of(folder: Path, name: str, part: str = "") -> Path:
    """NAME.py or NAME/__main__.py, of a part NAME/PART.py. Raises click.BadParameter for an unknown name."""
    if name not in PARTS:
        raise click.BadParameter(f"{name!r} is none of: {', '.join(PARTS)}", param_hint="'NAME'")
    if part and part not in PARTS[name]:
        known = ", ".join(PARTS[name]) or "none"
        raise click.BadParameter(f"{part!r} is no part of {name}, which has: {known}", param_hint="'NAME'")
    path = folder / name.replace("-", "_")
    if part:
        return path / f"{part.replace('-', '_')}.py"
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def _first_line(script: Path) -> str:
    """The first line of a benchmark's docstring, without running it."""
    with script.open() as source:
        return source.readline().strip().removeprefix('"""').removesuffix('"""')
