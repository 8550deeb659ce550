"""Seeded bugs: each is one change of text in a copy of cachemgr/, and each has to be noticed by the tests.

    python tests/mutants.py                  all of them
    python tests/mutants.py fork "no pin"    those with such words in their names
    python tests/mutants.py --suite machine  by the state machine alone

The tree is never changed: a copy of the package with the bug stands in for quire.cachemgr in a process of its own.
Exits with 1 if a bug survives, or if the text it changes is not there exactly once.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "cachemgr"
SUITES = {
    "examples": ["test_pool.py", "test_prefix.py", "test_ledger.py", "test_catalog.py"],
    "machine": ["test_ledger_machine.py"],
}
MACHINE_EXAMPLES = "700"
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str


NO_BUG = Mutant("no bug", "pool.py", '"""The block pool:', '"""The block pool:')

FORKS = """        for fork in request.forks:
            self._answer(PlanItem.FORK, fork.child_id, self._fork(fork))
"""
EXTENDS = """        for seq_id, num_tokens in zip(request.extend_ids, request.extend_token_counts, strict=True):
            self._answer(PlanItem.EXTEND, seq_id, self._extend(seq_id, num_tokens, request.appends.get(seq_id, b"")))
"""

MUTANTS = [
    # who may be handed out, and when
    Mutant(
        "no pin: released blocks are free at once",
        "planner.py",
        "        if self._lease.in_flight:\n            for block_id in tail_first:",
        "        if False:\n            for block_id in tail_first:",
    ),
    Mutant(
        "no pin for the source of a copy",
        "planner.py",
        "        self._pool.pin(source)\n        self._step.pinned.append(source)\n",
        "",
    ),
    Mutant(
        "no pin for a duplicate that steps in flight still use",
        "ledger.py",
        "        if lease.in_flight:\n            self._blocks.pin(duplicate)",
        "        if False:\n            self._blocks.pin(duplicate)",
    ),
    Mutant(
        "pins of the first step in flight instead of the last",
        "planner.py",
        "self._lease.in_flight[-1].pinned.extend(tail_first)",
        "self._lease.in_flight[0].pinned.extend(tail_first)",
    ),
    Mutant(
        "pins ignored",
        "pool.py",
        "if self._ref_count[block_id] or self._pin_count[block_id]:",
        "if self._ref_count[block_id]:",
    ),
    Mutant(
        "unpinned before published",
        "ledger.py",
        "        self._count(outcome)\n        if outcome",
        "        self._count(outcome)\n        self._finish(step)\n        step.pinned.clear()\n"
        "        step.num_released_rows = 0\n        if outcome",
    ),
    Mutant(
        "a lease's blocks come back when it ends",
        "ledger.py",
        "        self._leases[lease_id].state = LeaseState.FENCING\n        return True",
        "        self.lease_fenced(lease_id)\n        return True",
    ),
    Mutant(
        "a lease's blocks come back when it expires",
        "ledger.py",
        "        for lease in expired:\n            lease.state = LeaseState.FENCING",
        "        for lease in expired:\n            self.lease_fenced(lease.lease_id)",
    ),
    Mutant(
        "a fenced lease's pins are forgotten",
        "ledger.py",
        "        for step in lease.in_flight:\n            self._finish(step)\n        self._check()",
        "        self._check()",
    ),
    Mutant(
        "off by one: the last block is never given to a running sequence",
        "planner.py",
        "if num_fresh > self._pool.num_allocatable:",
        "if num_fresh and num_fresh >= self._pool.num_allocatable:",
    ),
    Mutant(
        "off by one: the last block is never given to a new sequence",
        "planner.py",
        "if num_fresh + reserve > available:",
        "if num_fresh + reserve >= available:",
    ),
    Mutant("blocks found count as room", "planner.py", " - sum(map(self._pool.is_cached, found))", ""),
    Mutant("reserve ignored", "planner.py", "if num_fresh + reserve > available:", "if num_fresh > available:"),
    Mutant(
        "released twice",
        "planner.py",
        "        sequence.released = True\n        self._let_go",
        "        sequence.released = True\n        self._let_go(sequence.block_table[:1])\n        self._let_go",
    ),
    Mutant(
        "rows of released sequences are free at once",
        "planner.py",
        "        self._step.num_released_rows += 1\n",
        "        self._num_rows -= 1\n",
    ),
    # who may write
    Mutant("copy-on-write dropped", "planner.py", "if not self._pool.is_writable(table[i])]", "if False]"),
    Mutant("copy-on-write without the copy", "planner.py", "is_copied=index * block_size < start", "is_copied=False"),
    Mutant(
        "shared blocks are written",
        "pool.py",
        "return self._ref_count[block_id] == 1 and not self._sealed[block_id]",
        "return not self._sealed[block_id]",
    ),
    Mutant(
        "published blocks are written",
        "pool.py",
        "            self._sealed[block_id] = 1\n",
        "            self._sealed[block_id] = 0\n",
    ),
    Mutant(
        "fork without acquire",
        "planner.py",
        "        for block_id in table:\n            self._pool.acquire(block_id)\n",
        "",
    ),
    Mutant("forks after extends", "planner.py", FORKS + EXTENDS, EXTENDS + FORKS),
    Mutant(
        "a fork has no copy of the last token to compute",
        "planner.py",
        "min(parent.num_scheduled, num_tokens - 1)",
        "min(parent.num_scheduled, num_tokens)",
    ),
    Mutant(
        "a fork does not get the token being sampled",
        "planner.py",
        "                    run.receivers.append(child)\n",
        "                    pass\n",
    ),
    Mutant(
        "a fork's copy of a published block is kept",
        "planner.py",
        "num_published=min(parent.num_published, num_scheduled // self._geometry.block_size)",
        "num_published=min(parent.num_published, num_full)",
    ),
    # what can be found
    Mutant(
        "published when planned",
        "planner.py",
        "                self._lease.pending[prefix_hash] = block_id\n",
        "                self._lease.pending[prefix_hash] = self._pool.publish(prefix_hash, block_id)\n",
    ),
    Mutant(
        "published though the step failed",
        "ledger.py",
        "        elif step.runs and not step.is_doomed:\n            self._doom_in_flight(lease)",
        "        elif step.runs:\n            for run in step.runs:\n"
        "                run.sequence.num_computed = run.end\n"
        "                self._publish(lease, run.sequence)\n            self._doom_in_flight(lease)",
    ),
    Mutant(
        "a plan made after a failure still fails",
        "ledger.py",
        "            lease.known_step = step.step_number\n",
        "",
    ),
    Mutant(
        "a doomed step dooms again",
        "ledger.py",
        "        elif step.runs and not step.is_doomed:",
        "        elif step.runs:",
    ),
    Mutant(
        "an evicted block can still be found",
        "pool.py",
        "        self._index.forget(block_id)\n        self._num_evicted += 1",
        "        self._num_evicted += 1",
    ),
    Mutant("released head first", "planner.py", "tail_first = block_ids[::-1]", "tail_first = block_ids[:]"),
    Mutant(
        "most recently used is evicted first",
        "pool.py",
        "block_id = self._lru_next[NULL_BLOCK]\n        self._lru_remove",
        "block_id = self._lru_prev[NULL_BLOCK]\n        self._lru_remove",
    ),
    Mutant(
        "cached blocks go before free ones",
        "pool.py",
        "self._free.pop() if self._free else self._evict()",
        "self._evict() if self._num_cached else self._free.pop()",
    ),
    Mutant(
        "tenant left out of the root",
        "prefix.py",
        "(tenant.encode(), salt, model_fingerprint.encode())",
        "(salt, model_fingerprint.encode())",
    ),
    Mutant(
        "salt left out of the root",
        "prefix.py",
        "(tenant.encode(), salt, model_fingerprint.encode())",
        "(tenant.encode(), model_fingerprint.encode())",
    ),
    Mutant("hashes not chained", "prefix.py", "sha256(parent + tokens[start", "sha256(tokens[start"),
    Mutant(
        "nothing left to compute of a cached prompt",
        "planner.py",
        "hashes[: (num_tokens - 1) // self._geometry.block_size]",
        "hashes",
    ),
    Mutant(
        "pending blocks kept after a failure",
        "ledger.py",
        "        lease.pending.clear()\n        for step in",
        "        for step in",
    ),
    Mutant(
        "pending blocks kept after the step",
        "ledger.py",
        "            lease.pending.pop(prefix_hash, None)\n",
        "            pass\n",
    ),
    Mutant(
        "pending blocks kept after a trim",
        "planner.py",
        "            if self._lease.pending.get(prefix_hash) == block_id:  # may",
        "            if False:  # may",
    ),
    Mutant(
        "pending blocks shared after their release",
        "planner.py",
        "if block_id is None or not self._pool.ref_count(block_id):",
        "if block_id is None:",
    ),
    Mutant(
        "a released sequence publishes what others write on",
        "planner.py",
        "if self._pool.pin_count(table[index]) and index not in foreign:",
        "if False:",
    ),
    Mutant(
        "pending blocks kept after others write on them",
        "planner.py",
        "                if self._lease.pending.get(prefix_hash) == block_id:\n                    del",
        "                if False:\n                    del",
    ),
    Mutant(
        "a duplicate is swapped and nobody is told",
        "ledger.py",
        "        lease.table_changes.append((sequence, index))\n",
        "",
    ),
    Mutant("duplicates are kept", "ledger.py", "if standing != block_id and not sequence.released:", "if False:"),
    Mutant(
        "the cache is reset but for the index",
        "pool.py",
        "                self._free.append(block_id)\n            self._index.forget(block_id)",
        "                self._free.append(block_id)",
    ),
    # steps and tokens
    Mutant("promised tokens kept after a failure", "sequences.py", "        self.num_promised = 0\n", ""),
    Mutant(
        "scheduled tokens kept after a failure", "sequences.py", "        self.num_scheduled = self.num_computed\n", ""
    ),
    Mutant(
        "the sampled token kept after a failure",
        "sequences.py",
        "            self.sampled_position = None\n",
        "            pass\n",
    ),
    Mutant(
        "the sampled token kept after a trim",
        "planner.py",
        "            sequence.sampled_position = None\n        for step",
        "            pass\n        for step",
    ),
    Mutant(
        "what is trimmed is still sampled", "planner.py", "        run.receivers.remove(sequence)\n", "        pass\n"
    ),
    Mutant(
        "computed beyond a trim",
        "ledger.py",
        "max(run.sequence.num_computed, run.end)",
        "max(run.sequence.num_computed, run.sampled_position)",
    ),
    Mutant(
        "a failure of an empty step forgets what is in flight",
        "ledger.py",
        "        elif step.runs and not step.is_doomed:\n",
        "        elif not step.is_doomed:\n",
    ),
    Mutant(
        "wrong tokens in the digest",
        "planner.py",
        "sha256(sequence.token_bytes(start, end))",
        "sha256(sequence.token_bytes(0, end))",
    ),
    Mutant("budget ignored", "planner.py", "            self._budget -= count\n", "            pass\n"),
    # calls
    Mutant("request_id ignored", "leases.py", "if not request_id or request_id not in self.answers:", "if True:"),
    Mutant(
        "a reused request_id gets the old answer",
        "leases.py",
        "        if known_digest != digest:\n",
        "        if False:\n",
    ),
    Mutant(
        "epoch not checked",
        "ledger.py",
        "        if epoch == self.epoch:\n            return\n",
        "        if True:\n            return\n",
    ),
    Mutant(
        "reports taken twice",
        "ledger.py",
        "if lease is None or step_number <= lease.settled_step:",
        "if lease is None:",
    ),
    Mutant(
        "an ended lease goes on planning",
        "ledger.py",
        "return lease is not None and lease.state is LeaseState.OPEN",
        "return lease is not None",
    ),
    Mutant(
        "a renewal does not count", "leases.py", "            if lease.expires_at > now:\n", "            if False:\n"
    ),
    Mutant(
        "any worker that is back has its epoch's books",
        "catalog.py",
        "if known is not None and known.ledger.epoch == registration.epoch:",
        "if known is not None:",
    ),
    Mutant(
        "a stranger's history is ignored",
        "catalog.py",
        "        if registration.attached_term:\n            return None\n",
        "",
    ),
]


def mutate(mutant: Mutant, folder: Path) -> None:
    """Makes a copy of the package with the bug."""
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text is {source.count(mutant.old)} times in {mutant.file}")
    path.write_text(source.replace(mutant.old, mutant.new, 1))


def is_noticed(folder: Path, files: list[str]) -> bool:
    """Whether a test fails with the package in `folder`."""
    paths = [str(TESTS / "unit" / file) for file in files]
    command = [sys.executable, __file__, "--stand-in", str(folder), *paths]
    environment = os.environ | {"QUIRE_MACHINE_EXAMPLES": MACHINE_EXAMPLES, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the tests did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.returncode == 1


def killer_of(mutant: Mutant, suites: dict[str, list[str]]) -> str | None:
    """The first suite that notices the bug; None if none does."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "cachemgr"
        mutate(mutant, folder)
        return next((name for name, files in suites.items() if is_noticed(folder, files)), None)


def stand_in(folder: str, arguments: list[str]) -> int:
    """Runs pytest in this process with the package in `folder` as quire.cachemgr."""
    root = Path(folder)

    class StandIn:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            if name == "quire.cachemgr":
                where = [folder]
                return importlib.util.spec_from_file_location(
                    name, root / "__init__.py", submodule_search_locations=where
                )
            if name.startswith("quire.cachemgr."):
                return importlib.util.spec_from_file_location(name, root / f"{name.split('.')[-1]}.py")
            return None

    sys.meta_path.insert(0, StandIn)
    import pytest

    import quire.cachemgr.ledger as ledger

    assert Path(ledger.__file__).parent == root
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", *arguments]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bugs with one of these in their names")
    parser.add_argument("--suite", choices=SUITES, help="only these tests; default: one after the other")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    suites = {name: files for name, files in SUITES.items() if options.suite in (None, name)}
    mutants = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]

    def judge(mutant: Mutant) -> tuple[Mutant, str | None, float]:
        start = time.monotonic()
        return mutant, killer_of(mutant, suites), time.monotonic() - start

    num_survivors = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, killer, seconds in pool.map(judge, [NO_BUG, *mutants]):
            if mutant is NO_BUG:
                if killer is not None:
                    raise SystemExit(f"the {killer} fail without a bug")
                continue
            num_survivors += killer is None
            print(f"{killer or 'SURVIVED':9} {seconds:5.1f} s  {mutant.file:12} {mutant.name}", flush=True)
    print(f"{len(mutants)} bugs, {num_survivors} survived")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stand-in"]:
        sys.exit(stand_in(sys.argv[2], sys.argv[3:]))
    sys.exit(main())
