"""Makes pictures of what really ran, on this machine.

    .venv/bin/python docs/images/make_images.py

demo.svg is the end of `quire demo`, top.svg a frame of `quire top` while two tenants generate. architecture.svg is
written by hand.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import tempfile
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from quire.client import Credentials, Engine, SamplingParams
from quire.client.commands import DEFAULT_CACHEMGR
from quire.client.demo import DemoOptions, Prompts, read_prompts, report, run_demo
from quire.client.launch import LocalServices
from quire.client.token import entry, make_token
from quire.client.top import look_once
from quire.client.top_view import Shown, TopScreen

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
    shown = dataclasses.replace(look_at_two_tenants(), address=DEFAULT_CACHEMGR)
    save("top", "quire top", TopScreen(shown, height=36), width=104, height=36)


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


if __name__ == "__main__":
    main()
