"""A server's memory, in a separate interpreter, for pytest's heap is not a server's.

The objects that the tuned collector scans, and the freed memory that the process keeps.
"""

import os
import subprocess
import sys
import textwrap

import pytest
from deadlines import DEADLINE_S


def run(code: str, **environment: str) -> str:
    prelude = "import gc, weakref\nfrom quire.serving.runtime import *\n"
    source = prelude + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", source],
        check=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | environment,
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


def test_nothing_is_collected_while_it_is_paused() -> None:
    """Objects that are made meanwhile are not scanned later, also after an error."""
    code = """
    try:
        with collector_paused():
            lasting = [[] for _ in range(1000)]
            print(gc.isenabled())
            raise ImportError
    except ImportError:
        print(gc.isenabled(), gc.get_freeze_count() > 1000)
    """
    assert run(code).split() == ["False", "True", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
@pytest.mark.parametrize(
    ("setting", "environment", "is_kept"),
    [
        ("keep_freed_memory()", {}, True),
        ("keep_freed_memory()", {"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        ("keep_little_free_memory()", {}, False),
    ],
)
def test_freed_memory_is_kept_by_a_process_that_computes(
    setting: str, environment: dict[str, str], is_kept: bool
) -> None:
    code = f"""
    import psutil
    {setting}
    before = psutil.Process().memory_info().rss
    bytearray(2**26)
    print(psutil.Process().memory_info().rss - before > 2**25)
    """
    assert run(code, **environment) == str(is_kept)
