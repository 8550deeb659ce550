"""The objects that the tuned collector scans, in a separate interpreter: pytest's heap is not a server's."""

import subprocess
import sys
import textwrap

from deadlines import DEADLINE_S


def run(code: str) -> str:
    prelude = "import gc, weakref\nfrom quire.serving.runtime import tune_garbage_collector\n"
    source = prelude + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout.strip()


def test_tuning_takes_what_lives_out_of_sight_and_collects_seldom() -> None:
    code = """
    lasting = [[] for _ in range(1000)]
    tune_garbage_collector()
    print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 100, gc.get_threshold())
    """
    assert run(code) == "True True (10000, 10, 10)"


def test_tuning_collects_garbage_first() -> None:
    code = """
    class Node: pass
    node = Node()
    node.self = node
    ended = weakref.ref(node)
    del node
    tune_garbage_collector()
    print(ended())
    """
    assert run(code) == "None"


def test_cycles_made_after_tuning_are_still_found() -> None:
    code = """
    class Node: pass
    tune_garbage_collector()
    node = Node()
    node.self = node
    ended = weakref.ref(node)
    del node
    for _ in range(20_000):
        other = Node()
        other.self = other
    print(ended())
    """
    assert run(code) == "None"
