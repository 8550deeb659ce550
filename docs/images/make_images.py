"""Makes pictures of what really ran, on this machine.

    .venv/bin/python docs/images/make_images.py

demo.svg is the end of `quire demo`, top.svg a frame of `quire top` while two tenants generate, profile.svg one step of
a trace by `quire worker --profile`. architecture.svg is written by hand.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from quire.cli.demo import DemoOptions, Prompts, read_prompts, report, run_demo
from quire.cli.launch import LocalServices
from quire.cli.token import entry, make_token
from quire.cli.top import look_once
from quire.cli.top_view import Shown, TopScreen
from quire.client import Credentials, Engine, SamplingParams

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "quire"

HERE = Path(__file__).parent
DEPLOY = HERE.parents[1] / "deploy"
OPTIONS = DemoOptions(model=None, prompts=None, num_samples=2, max_tokens=48, num_blocks=129, seed=20)
CALLERS = {"alice": "client", "bob": "client", "olga": "operator", "worker-1": "worker"}
NUM_BLOCKS = 400
REQUESTS = {"alice": 4, "bob": 3}
"""At a time."""
LOOKS, INTERVAL_S = 40, 0.25


def main() -> None:
    """Runs what is drawn, then draws it."""
    run, samples = run_demo(OPTIONS)
    save("demo", "quire demo", "[bold]$ make demo[/]", samples, report(run, samples), width=100, height=26)
    shown = dataclasses.replace(look_at_two_tenants(), address="unix:/run/quire/cachemgr.sock")
    save("top", "quire top", TopScreen(shown, height=36), width=104, height=36)
    draw_profile(profile_steps())


def save(name: str, title: str, *parts: RenderableType, width: int, height: int) -> None:
    """Draws a terminal of this size."""
    console = Console(
        record=True, width=width, height=height, force_terminal=True, color_system="truecolor", highlight=False
    )
    for part in parts:
        console.print(part)
    console.save_svg(str(HERE / f"{name}.svg"), title=title, theme=MONOKAI, unique_id=f"quire-{name}")


def look_at_two_tenants() -> Shown:
    """A frame of `quire top` as an operator sees it, in the midst of the work."""
    with tempfile.TemporaryDirectory(prefix="quire-images-") as name:
        folder = Path(name)
        tokens = {caller: make_token() for caller in CALLERS}
        for caller, token in tokens.items():
            (folder / caller).write_text(token)
        lines = (entry(caller, (CALLERS[caller],), token) for caller, token in tokens.items())
        (folder / "tokens").write_text("\n".join(lines))
        with LocalServices.start(
            model=DEPLOY / "demo" / "model",
            num_blocks=NUM_BLOCKS,
            extra_cachemgr_args=("--token-file", str(folder / "tokens")),
            extra_worker_args=("--cachemgr-token-file", str(folder / "worker-1")),
        ) as services:
            return asyncio.run(look_while_generating(services.cachemgr_address, folder))


async def look_while_generating(cachemgr: str, tokens: Path) -> Shown:
    """Both tenants are kept busy until the frame is there."""
    prompts = read_prompts(DEPLOY / "demo" / "prompts.json")
    async with contextlib.AsyncExitStack() as stack:
        work = []
        for caller, num_requests in REQUESTS.items():
            engine = Engine.connect(cachemgr, credentials=Credentials(token_file=tokens / caller))
            await stack.enter_async_context(engine)
            work += [asyncio.create_task(keep_generating(engine, prompts, first)) for first in range(num_requests)]
        credentials = Credentials(token_file=tokens / "olga")
        shown = await look_once(cachemgr, "", interval_s=INTERVAL_S, num_looks=LOOKS, credentials=credentials)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        return shown


async def keep_generating(engine: Engine, prompts: Prompts, first: int) -> None:
    """Two samples of a prompt, then of the next one, without an end."""
    for number in itertools.count(first):
        params = SamplingParams(n=2, max_tokens=60 + 30 * (number % 5), temperature=0.8, seed=number, ignore_eos=True)
        await engine.complete([prompts.full(number % len(prompts.prompts))], params)


def profile_steps() -> list[dict[str, Any]]:
    """The ranges of a few decode steps of the demo's model."""
    with tempfile.TemporaryDirectory(prefix="quire-images-") as name:
        path = Path(name) / "trace.json"
        flags = ("--profile", str(path), "--profile-steps", "20:3")
        with LocalServices.start(
            model=DEPLOY / "demo" / "model", num_blocks=NUM_BLOCKS, extra_worker_args=flags
        ) as both:
            asyncio.run(generate_eight(both.cachemgr_address))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


async def generate_eight(cachemgr: str) -> None:
    """Eight samples of one prompt."""
    prompts = read_prompts(DEPLOY / "demo" / "prompts.json")
    async with Engine.connect(cachemgr) as engine:
        await engine.complete([prompts.full(0)], SamplingParams(n=8, max_tokens=40, temperature=0.8, seed=1))


def draw_profile(events: Sequence[dict[str, Any]]) -> None:
    """The second step: what contains what from top to bottom, time to the right."""
    named = [event for event in events if event.get("cat") == "user_annotation"]
    step = [event for event in named if event["name"].startswith("step ")][1]
    begin, end = step["ts"], step["ts"] + step["dur"]
    rows: dict[str, list[dict[str, Any]]] = {"step": [step], "phase": [], "attention": [], "operations": []}
    last_end = begin
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event is step or not begin <= event.get("ts", -1) < end or "dur" not in event:
            continue
        if event in named:
            rows["attention" if event["name"].startswith("attention") else "phase"].append(event)
        elif event.get("cat") == "cpu_op" and event["ts"] >= last_end:  # of torch's, those that no other one called
            rows["operations"].append(event)
            last_end = event["ts"] + event["dur"]
    figure, axes = pyplot.subplots(figsize=(11, 2.8))
    for place, (row, members) in enumerate(rows.items()):
        spans = [(event["ts"] - begin, event["dur"]) for event in members]
        colors = [f"C{index % 10}" for index in range(len(members))] if row != "operations" else ["#888"] * len(members)
        axes.broken_barh(spans, (-place - 0.4, 0.8), facecolors=colors, edgecolor="white", linewidth=0.3)
        for event, (start, length) in zip(members, spans, strict=True):
            if row != "operations" and length > 0.025 * step["dur"]:
                axes.text(
                    start + length / 2, -place, event["name"].replace(" ", "\n"), ha="center", va="center", fontsize=7
                )
    axes.set_yticks([-place for place in range(len(rows))], list(rows))
    axes.set_xlabel("µs")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "profile.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
