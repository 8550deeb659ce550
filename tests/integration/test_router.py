"""The router example, run as it is: prompts about one document meet on one of two real workers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROUTER = Path(__file__).parents[2] / "client" / "examples" / "router.py"
DOCUMENTS = {"models", "locks", "defaults"}
ROW = re.compile(r"│ (worker-\d) +│ ([a-z0-9, ]+?) +│ (\d+) +│ (\d+) +│")


def test_prompts_with_one_beginning_meet_on_one_worker() -> None:
    done = subprocess.run([sys.executable, "-P", str(ROUTER)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    by_prefix, in_turn = halves(done.stdout)
    routed, spread = places(by_prefix), places(in_turn)
    assert set(routed) == {"worker-1", "worker-2"}
    assert sorted(about for abouts in routed.values() for about in abouts) == sorted(f"{name} 4" for name in DOCUMENTS)
    assert all(routed.values()), "both have something to do"
    assert all({about.split()[0] for about in abouts} == DOCUMENTS for abouts in spread.values())
    assert hit_percentage(by_prefix) > hit_percentage(in_turn) + 10


def halves(text: str) -> tuple[str, str]:
    """By prefix, and in turn."""
    match = re.search(r"^In turn *$", text, re.MULTILINE)
    assert match is not None, text
    return text[: match.start()], text[match.start() :]


def places(text: str) -> dict[str, list[str]]:
    """The prompts that each worker was queried for, and how often."""
    return {pool: about.split(", ") for pool, about, _, _ in ROW.findall(text)}


def hit_percentage(text: str) -> float:
    """As it is printed in the rows."""
    numbers = [(int(num_tokens), int(num_cached)) for _, _, num_tokens, num_cached in ROW.findall(text)]
    (printed,) = re.findall(r": ([\d.]+)% of all tokens", text)
    assert float(printed) == round(100 * sum(row[1] for row in numbers) / sum(row[0] for row in numbers), 1)
    return float(printed)
