"""Eviction policies in Python: the same calls as those of the crate, and errors that leave whole books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from planning import Admission, StepOutcome, StepRequest, plan_step, report_of

from quire.cachemgr._core import Ledger
from quire.cachemgr.geometry import Geometry
from quire.lab import ConfigError, LabConfig, run
from quire.lab.config import config_of
from quire.lab.simulation import Simulation

LRU = """
class Lru:
    def __init__(self, num_blocks):
        self.parked = {}  # in the order of their release

    def admit(self, found, fresh, hashes):
        pass

    def park(self, blocks):
        self.parked.update(dict.fromkeys(blocks))

    def unpark(self, blocks):
        for block in blocks:
            del self.parked[block]

    def forget(self, blocks):
        assert not self.parked.keys() & set(blocks)

    def evict(self, count):
        victims = list(self.parked)[:count]
        self.unpark(victims)
        return victims
"""


def config(eviction: str, folder: Path, *, layer_groups: Sequence[Any] = (), **load: Any) -> LabConfig:
    """Conversations in two pools that are too small for them."""
    sessions = {"kind": "chat", "rate": 4.0, "system_tokens": 64, "most_tokens": 1024, "think_s": 2.0}
    step = {"form": "additive", "base_s": 0.01, "token_s": 1e-4}
    table = {
        "load": {"sessions": sessions, "requests": 80} | load,
        "fleet": {
            "workers": 2,
            "blocks": 120 * max(1, len(layer_groups)),
            "step": step,
            "eviction": eviction,
            "layer_groups": list(layer_groups),
        },
    }
    return config_of(table, name="test", folder=folder)


class Watched(Simulation):
    """Notes the evictions of all pools at the end of each request."""

    def __init__(self, given: LabConfig) -> None:
        super().__init__(given, 1)
        self.ends: list[tuple[int, list[int]]] = []

    def _finish(self, number: int) -> None:
        self.ends.append((number, [pool.pool_statistics().evicted_block_count for pool in self.pools]))
        super()._finish(number)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tenants": {"a": 3.0, "b": 1.0}},
        {"layer_groups": [{"kind": "full", "layers": 1}, {"kind": "sliding", "window": 48, "layers": 1}]},
    ],
    ids=["one tenant", "two tenants", "layer groups"],
)
def test_lru_in_python_equals_the_built_in_one_request_by_request(tmp_path: Path, given: dict[str, Any]) -> None:
    (tmp_path / "mine.py").write_text(LRU)
    mine, lru = (Watched(config(each, tmp_path, **given)) for each in ("mine.py:Lru", "lru"))
    figures = [each.run().describe() for each in (mine, lru)]
    assert figures[0] == figures[1]
    assert mine.records == lru.records
    assert mine.ends == lru.ends
    assert min(mine.ends[-1][1]) > 0


def test_another_order_has_other_hits(tmp_path: Path) -> None:
    """The most recently parked first."""
    (tmp_path / "mine.py").write_text(LRU.replace("[:count]", "[-count:]"))
    found = [run(config(each, tmp_path)).metrics["hit_ratio"] for each in ("mine.py:Lru", "lru")]
    assert found[0] != found[1]


def broken(method: str, line: str) -> str:
    """The policy with a line that fails in a method's place."""
    head, _, tail = LRU.partition(f"def {method}(")
    parameters, _, rest = tail.partition(":\n")
    return f"{head}def {method}({parameters}:\n        {line}\n{rest}"


@pytest.mark.parametrize("method", ["__init__", "admit", "park", "unpark", "forget", "evict"])
def test_an_error_names_file_and_line(method: str, tmp_path: Path) -> None:
    source = broken(method, "raise KeyError('no such block')")
    (tmp_path / "mine.py").write_text(source)
    at = 1 + source.splitlines().index("        raise KeyError('no such block')")
    # Only a preempted prompt is forgotten before it is computed.
    with pytest.raises(ConfigError, match=rf"mine.py:{at}: the policy failed: KeyError\('no such block'\)$"):
        run(config("mine.py:Lru", tmp_path, requests=200))


WRONG_VICTIMS = {
    "too few": ("return []", r"evict\((\d+)\) returned 0 blocks: must return \1 different parked blocks"),
    "the same again": (
        "return [next(iter(self.parked))] * count",
        r"evict\((\d+)\) returned block \d+, which is not parked: must return \1 different parked blocks",
    ),
    "no block": (
        "return [0] * count",
        r"evict\((\d+)\) returned block 0, which is not parked: must return \1 different",
    ),
    "beyond the pool": ("return [10**6] * count", r"evict\(\d+\) returned block 1000000, which is not parked: must "),
    "below": ("return [-1] * count", r"evict\((\d+)\) returned \[-1.*\]: must return \1 different parked blocks"),
    "no list": ("return None", r"evict\((\d+)\) returned None: must return \1 different parked blocks"),
}


@pytest.mark.parametrize("case", WRONG_VICTIMS)
def test_wrong_victims_are_named_with_the_line_of_the_method(case: str, tmp_path: Path) -> None:
    line, said = WRONG_VICTIMS[case]
    source = broken("evict", line)
    (tmp_path / "mine.py").write_text(source)
    at = 1 + source.splitlines().index("    def evict(self, count):")
    with pytest.raises(ConfigError, match=rf"mine.py:{at}: {said}"):
        run(config("mine.py:Lru", tmp_path))


WRONG_CLASSES = {
    "no method": (LRU.replace("def forget", "def forgot"), r"mine.py:2: class Lru has no method forget: expected def "),
    "no place for the size": (
        LRU.replace("def __init__(self, num_blocks)", "def __init__(self)"),
        r"mine.py:3: Lru.__init__ has other parameters .*: expected def __init__\(self, num_blocks\)",
    ),
    "no beginning": ("class Lru: pass\n", r"mine.py:1: class Lru has no method __init__: expected def __init__"),
}


@pytest.mark.parametrize("case", WRONG_CLASSES)
def test_a_class_that_is_no_policy_is_named_with_what_was_expected(case: str, tmp_path: Path) -> None:
    source, said = WRONG_CLASSES[case]
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=said):
        run(config("mine.py:Lru", tmp_path))


def test_a_policy_that_is_neither_name_nor_file_lists_the_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fleet.eviction is 'fifo': must be .FILE.py:CLASS., or one of lineage, lru"):
        run(config("fifo", tmp_path))


GEOMETRY = Geometry(
    block_size=2, num_blocks=17, block_bytes=1, max_sequences=4, max_sequence_tokens=32, vocab_size=9, model="m",
    model_fingerprint="m",
)  # fmt: skip


class Failing:
    """LRU in Python that fails at one call of a method."""

    def __init__(self, method: str = "", at: int = 0) -> None:
        names: dict[str, Any] = {}
        exec(LRU, names)
        self._lru = names["Lru"](GEOMETRY.num_blocks - 1)
        self._method, self._at = method, at
        self.num_calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            self.num_calls[name] += 1
            if name == self._method and self.num_calls[name] == self._at:
                raise KeyError("no such block")
            return getattr(self._lru, name)(*given)

        return call


def ledger_with(policy: Any) -> Ledger:
    ledger = Ledger("pool", 1, GEOMETRY, policy=policy)
    ledger.open_lease("lease", ttl_s=1.0, now=0.0)
    return ledger


def in_lockstep(one: Ledger, other: Ledger, num_steps: int = 120) -> int:
    """Change both alike, at random, and compare them after each; return how many changes raised KeyError."""
    rng, num_changes, num_finished = Random(1), 0, 0

    def both(change: Callable[[Ledger], Any]) -> Any:
        nonlocal num_changes, num_finished
        num_changes += 1
        done = change(one)
        with suppress(KeyError):
            change(other)
            num_finished += 1
        assert other.probe.state() == one.probe.state()
        assert other.probe.violations() == []
        return done

    for step in range(1, num_steps + 1):
        prompt = b"".join(rng.choice([1, 2]).to_bytes(4, "little") for _ in range(rng.randint(1, 20)))
        request = StepRequest(releases=[step - 2], admissions=[Admission(step, prompt)])
        plan = both(lambda ledger, request=request: plan_step(ledger, "lease", request, now=0.0))
        outcome = StepOutcome.FAILED if rng.random() < 0.1 else StepOutcome.COMPUTED
        is_computed = outcome is StepOutcome.COMPUTED
        ends = [start + count for start, count in zip(plan.run_starts, plan.run_token_counts, strict=True)]
        sampled = plan.run_seq_ids if is_computed else []
        report = report_of(
            *("lease", step, outcome),
            seq_ids=plan.run_seq_ids if is_computed else [],
            token_counts=ends if is_computed else [],
            sampled_ids=sampled,
            sampled_tokens=[1] * len(sampled),
        )
        both(lambda ledger, report=report: ledger.settle(report))
        if step % 40 == 0:
            both(lambda ledger: ledger.reset_prefix_cache())
    return num_changes - num_finished


def test_a_policy_gets_every_call_and_its_choice_counts() -> None:
    policy = Failing()
    assert in_lockstep(ledger_with("lru"), ledger_with(policy)) == 0
    assert min(policy.num_calls[name] for name in ("admit", "park", "unpark", "forget", "evict")) > 1, policy.num_calls


@pytest.mark.parametrize("method", ["admit", "park", "unpark", "forget", "evict"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_change_in_which_a_policy_fails_is_whole_and_lru_decides_from_then_on(method: str, at: int) -> None:
    policy = Failing(method, at)
    assert in_lockstep(ledger_with("lru"), ledger_with(policy)) == 1
    assert policy.num_calls[method] == at, "it is not called again"


def test_books_with_a_policy_in_python_are_not_stored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="books with a policy in Python can't be stored"):
        Ledger("pool", 1, GEOMETRY, policy=Failing(), directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
