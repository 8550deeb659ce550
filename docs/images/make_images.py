"""Makes demo.svg: the end of a real run of `quire demo` on this machine.

    .venv/bin/python docs/images/make_images.py

architecture.svg is written by hand.
"""

from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from quire.client.demo import DemoOptions, report, run_demo

HERE = Path(__file__).parent
WIDTH, HEIGHT = 100, 26
OPTIONS = DemoOptions(model=None, prompts=None, num_samples=2, max_tokens=48, num_blocks=129, seed=20)


def main() -> None:
    """Runs the demo, then draws what it showed."""
    run, samples = run_demo(OPTIONS)
    console = Console(
        record=True, width=WIDTH, height=HEIGHT, force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print("[bold]$ make demo[/]")
    console.print(samples)
    console.print(report(run, samples))
    console.save_svg(str(HERE / "demo.svg"), title="quire demo", theme=MONOKAI, unique_id="quire-demo")


if __name__ == "__main__":
    main()
