"""Seeded bugs: each is one change of text in a copy of cachemgr/, and each has to be noticed by the tests.

    python tests/mutants.py                  all of them
    python tests/mutants.py fork "no pin"    those with such words in their names
    python tests/mutants.py --suite machine  by the state machine alone
    python tests/mutants.py --sample         all in Python, and of those in Rust a few

The tree is never changed. A copy of the package with the bug stands in for quire.cachemgr in a process of its own,
forked from one that has imported whatever takes long and is none of ours. For a bug in the core, each job has a copy of
the crate that it builds again and again, starting from what cargo has in core/target.

A test that hangs or takes the process down has noticed the bug. Exits with 1 if a bug survives. A bug whose text is not
there exactly once, outside of the crate's own tests, or that does not compile, is an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import hypothesis.stateful  # noqa: F401 - once, for all processes
import numpy  # noqa: F401
import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "cachemgr"
CRATE = PACKAGE / "core"
LIBRARY = "_core.abi3.so"
EXAMPLES = ["test_ledger.py", "test_leases.py", "test_catalog.py", "test_looking.py"]
RUST_EXAMPLES = EXAMPLES[:1]
SHELL_EXAMPLES = ["test_bounds.py", "test_shares.py", "test_time.py", "test_watch.py"]
SHELL = {"bounds.py", "inspection.py", "messages.py", "servicer.py", "shares.py", "watch.py"}
MACHINE = ["test_ledger_machine.py"]
SUITES = ["examples", "crate", "machine"]
"""Examples and state machine in Python; in between the crate's own tests."""

ENVIRONMENT = {
    "CARGO_TERM_COLOR": "never",
    "PYO3_PYTHON": sys.executable,
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "QUIRE_MACHINE_EXAMPLES": "700",
}
CARGO = ["--locked", "--lib", "--profile", "mutant"]
TEST_CARGO = [*CARGO, "--no-default-features"]
BUILD_TIMEOUT_S = 600
TIMEOUT_S = 300
MEMORY_BYTES = 8 << 30
NOT_RUN = 70
ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str

    @property
    def is_rust(self) -> bool:
        return self.file.endswith(".rs")

    @property
    def examples(self) -> list[str]:
        """The files of tests that are about its file."""
        if self.is_rust:
            return RUST_EXAMPLES
        return SHELL_EXAMPLES if self.file in SHELL else EXAMPLES

    @property
    def path(self) -> Path:
        """Where its file is in the package."""
        return Path("core/src", self.file) if self.is_rust else Path(self.file)

    def count(self) -> int:
        """How often its text is in its file, where once is right."""
        return product_of((PACKAGE / self.path).read_text()).count(self.old)

    def seed(self, folder: Path) -> None:
        """Changes its file in a copy of the package or, if it is Rust, of the crate."""
        if self.count() != 1:
            raise ValueError(f"{self.name}: its text is {self.count()} times in {self.file}")
        source = (PACKAGE / self.path).read_text()
        target = folder / (Path("src", self.file) if self.is_rust else self.file)
        target.write_text(source.replace(self.old, self.new, 1))


def product_of(source: str) -> str:
    """A file without the tests at the end of it, if it is one of the crate."""
    return source.split("\n#[cfg(test)]\n")[0]


NO_BUG = Mutant("no bug", "ledger.py", '"""The books of one pool', '"""The books of one pool')
NO_SHELL_BUG = Mutant("no bug in the shell", "bounds.py", "class Places:", "class Places:")
NO_RUST_BUG = Mutant("no bug in Rust", "lib.rs", "//! The books of a pool", "//! The books of a pool")

SAMPLE = {
    "no pin: released blocks are free at once",
    "copy-on-write without the copy",
    "several forks acquire once",
    "an entry taken out is still there",
    "tenant left out of the root",
    "a parent is kept shorter than its child",
    "computed beyond a trim",
    "sampled tokens are taken in the order of the runs",
}
"""Rust bugs that CI seeds."""

FINISHED = """        for step in &holdings.in_flight {
            self.finish(step)?;
        }
"""
RELEASED = """        for row in self.rows_in_order(&holdings) {
            let sequence = self.table.leave(row);
            self.pool.reserve(holdings.tenant, sequence.num_reserved, 0);
            self.pool.release(&sequence.blocks_tail_first(0))?;
            self.host.release(&sequence.host_blocks.unwrap_or_default())?;
        }
"""
FORKS = """        for fork in &request.forks {
            self.fork(fork)?;
        }
"""
EXTENDS = """        self.extend_all(&request.extends)?;
"""
TRIMS = """        for trim in &request.trims {
            let answer = self.trim(trim)?;
            self.answer(PlanItem::Trim, trim.seq_id, answer);
        }
"""
ADMISSIONS = """        self.budget = (request.admission_token_budget > 0).then_some(request.admission_token_budget);
        for restore in &request.restores {
            let answer = self.restore(restore, request.admission_reserve)?;
            self.answer(PlanItem::Restore, restore.seq_id, answer);
        }
        for admission in &request.admissions {
            let answer = self.admit(admission, request.admission_reserve)?;
            self.answer(PlanItem::Admission, admission.seq_id, answer);
        }
"""
NOT_FINDABLE = """            if !self.index.is_findable(block) || self.is_kept(block) {
                continue;
            }
"""
DROPPED = """            dropped += 1;
"""
FOUND = """                return Some(entry as u32);
            }
"""
REMOVED = """        blocks.iter().for_each(|block| self.rings.remove(*block));
"""
UNCOUNTED = """        self.num_parked -= blocks.len();
"""

MUTANTS: list[Mutant] = [
    # who may be handed out, and when
    Mutant(
        "no pin: released blocks are free at once",
        "books/planner.rs",
        "            Some(last) => {\n                self.pool.retire(&tail_first)?;\n"
        "                last.pinned.push(tail_first);\n                Ok(())\n            }\n",
        "            Some(_) => self.pool.release(&tail_first),\n",
    ),
    Mutant(
        "no pin for the source of a copy",
        "books/planner.rs",
        "        self.step.pinned.push(vec![source]);\n        self.pool.retire(&[source])\n",
        "        self.pool.release(&[source])\n",
    ),
    Mutant(
        "the source of a copy is pinned by the last step instead of this one",
        "books/planner.rs",
        "        self.step.pinned.push(vec![source]);\n        self.pool.retire(&[source])\n",
        "        self.let_go(vec![source])\n",
    ),
    Mutant(
        "no pin for a duplicate that steps in flight still use",
        "books/settle.rs",
        "            Some(last) => {\n                last.pinned.push(vec![duplicate]);\n"
        "                self.pool.retire(&[duplicate])\n            }\n",
        "            Some(_) => self.pool.release(&[duplicate]),\n",
    ),
    Mutant(
        "pins of the first step in flight instead of the last",
        "books/planner.rs",
        "match self.lease.in_flight.back_mut() {\n            Some(last) => {",
        "match self.lease.in_flight.front_mut() {\n            Some(last) => {",
    ),
    Mutant(
        "a duplicate is pinned by the first step in flight",
        "books/settle.rs",
        "match self.lease.in_flight.back_mut()",
        "match self.lease.in_flight.front_mut()",
    ),
    Mutant(
        "pins ignored where blocks come to rest",
        "cache/pool.rs",
        "copied().filter(|block| self.is_idle(*block))",
        "copied().filter(|block| self.ref_count(*block) == 0)",
    ),
    Mutant(
        "references ignored where blocks come to rest",
        "cache/pool.rs",
        "copied().filter(|block| self.is_idle(*block))",
        "copied().filter(|block| self.pin_count(*block) == 0)",
    ),
    Mutant(
        "unpinned before published",
        "books/settle.rs",
        'let step = self.lease.in_flight.pop_front().expect("it is the first one in flight");\n',
        'let mut step = self.lease.in_flight.pop_front().expect("it is the first one in flight");\n'
        "        for blocks in std::mem::take(&mut step.pinned) {\n            self.pool.unpin(&blocks)?;\n        }\n",
    ),
    Mutant("a step's pins are kept", "books/mod.rs", "try_for_each(|blocks| self.pool.unpin(blocks))?", "count()"),
    Mutant(
        "a lease's blocks come back when it ends",
        "ledger.py",
        "        lease.state = LeaseState.FENCING\n        self._books.end_lease(lease.lease_id)\n",
        "        self.lease_fenced(lease.lease_id)\n",
    ),
    Mutant(
        "a fenced lease's blocks do not come back", "ledger.py", "            self._books.close_lease(lease_id)\n", ""
    ),
    Mutant("a fenced lease's pins are forgotten", "books/mod.rs", FINISHED, ""),
    Mutant("a fenced lease's tables are forgotten", "books/mod.rs", RELEASED, ""),
    Mutant("what a fenced lease trimmed is kept longest", "books/mod.rs", FINISHED + RELEASED, RELEASED + FINISHED),
    Mutant(
        "a fenced lease's last sequence comes first",
        "books/mod.rs",
        "sort_unstable_by_key(|row| self.table.get(*row).number)",
        "sort_unstable_by_key(|row| std::cmp::Reverse(self.table.get(*row).number))",
    ),
    Mutant(
        "off by one: the last block is never given to a running sequence",
        "books/planner.rs",
        "let num_unreserved = num_fresh.saturating_sub(sequence.num_reserved);",
        "let num_unreserved = (num_fresh + usize::from(num_fresh > 0)).saturating_sub(sequence.num_reserved);",
    ),
    Mutant(
        "off by one: the last block is never given to a new sequence",
        "books/room.rs",
        "if needed + num_parked <= self.pool.num_available(self.tenant) {",
        "if needed + num_parked < self.pool.num_available(self.tenant) {",
    ),
    Mutant(
        "blocks found count as room",
        "books/room.rs",
        "if needed + num_parked <= self.pool.num_available(self.tenant) {",
        "if needed <= self.pool.num_available(self.tenant) {",
    ),
    Mutant(
        "pinned blocks found count as parked",
        "cache/pool.rs",
        "filter(|block| self.is_idle(**block) && !self.is_kept(**block)).count()",
        "filter(|block| self.ref_count(**block) == 0).count()",
    ),
    Mutant(
        "reserve ignored",
        "books/room.rs",
        "let (needed, available) = (needed + spared,",
        "let (needed, available) = (needed + spared.min(0),",
    ),
    Mutant(
        "cached blocks are no room",
        "cache/pool.rs",
        "self.free.len() + self.parking.num_parked()\n",
        "self.free.len()\n",
    ),
    Mutant(
        "a refusal does not count the reserve as needed",
        "books/room.rs",
        'Some(refusal.with("needed", needed).with("free", available)',
        'Some(refusal.with("needed", needed - spared).with("free", available)',
    ),
    Mutant(
        "room for the tokens computed only",
        "books/planner.rs",
        "let num_fresh = foreign.len() + self.geometry.num_blocks_for(num_tokens).saturating_sub(length)",
        "let num_fresh = foreign.len() + num_blocks.saturating_sub(length)",
    ),
    Mutant(
        "released twice",
        "books/planner.rs",
        "        self.let_go(blocks.clone())?;\n",
        "        self.let_go(blocks[..1].to_vec())?;\n        self.let_go(blocks.clone())?;\n",
    ),
    Mutant(
        "rows of released sequences are another's at once",
        "books/planner.rs",
        "        self.step.released_rows.push(row);\n",
        "        self.table.leave(row);\n",
    ),
    Mutant(
        "rows of released sequences are nobody's",
        "books/planner.rs",
        "        self.step.released_rows.push(row);\n",
        "",
    ),
    Mutant(
        "rows of released sequences are never free again",
        "books/mod.rs",
        "        step.released_rows.iter().for_each(|row| drop(self.table.leave(*row)));\n",
        "",
    ),
    Mutant("a row is given twice", "books/sequences.rs", "self.free.pop()", "self.free.last().copied()"),
    Mutant(
        "rows that were left count as taken",
        "books/sequences.rs",
        "self.rows.len() - self.free.len()",
        "self.rows.len()",
    ),
    Mutant("what comes later has no larger number", "books/sequences.rs", "        self.next_number += 1;\n", ""),
    Mutant(
        "references below none",
        "cache/pool.rs",
        "self.ref_count(block).checked_sub(1)",
        "Some(self.ref_count(block).saturating_sub(1))",
    ),
    Mutant(
        "pins below none",
        "cache/pool.rs",
        "self.pin_count(block).checked_sub(1)",
        "Some(self.pin_count(block).saturating_sub(1))",
    ),
    Mutant("what is retired keeps its reference", "cache/pool.rs", "            self.let_go(block)?;\n", ""),
    Mutant("what is retired has no pin", "cache/pool.rs", "            self.pins[block as usize] += 1;\n", ""),
    Mutant(
        "what has content is free, what has none is cached",
        "cache/pool.rs",
        "idle.into_iter().partition(|block| self.index.is_findable(*block))",
        "idle.into_iter().partition(|block| !self.index.is_findable(*block))",
    ),
    Mutant(
        "free blocks are taken from the bottom",
        "cache/pool.rs",
        "let mut blocks = self.free.split_off(self.free.len() - num_popped);",
        "let mut blocks: Vec<BlockId> = self.free.drain(..num_popped).collect();",
    ),
    Mutant("a table's free blocks come highest first", "cache/pool.rs", "        blocks.reverse();\n", ""),
    Mutant(
        "more blocks are taken than there are",
        "cache/pool.rs",
        "        if num_missing > self.parking.num_parked() {\n",
        "        if false {\n",
    ),
    Mutant(
        "cached blocks that are acquired stay parked",
        "cache/pool.rs",
        "            self.parking.unpark(&parked);\n        }\n",
        "        }\n",
    ),
    Mutant(
        "retired blocks that are acquired are taken out of the parked ones",
        "cache/pool.rs",
        "                    (0, false) => parked.push(block),\n",
        "                    (_, false) => parked.push(block),\n",
    ),
    Mutant(
        "blocks without content are shared",
        "cache/pool.rs",
        "                if !self.index.is_findable(block) {\n                    return",
        "                if false {\n                    return",
    ),
    # what the pool counts as it goes
    Mutant("handed-out blocks are not active", "cache/pool.rs", "        self.counters.num_active += count;\n", ""),
    Mutant("woken blocks are not active", "cache/pool.rs", "                self.counters.num_active += 1;\n", ""),
    Mutant(
        "a released block is not counted as active no more",
        "cache/pool.rs",
        "        self.counters.num_active -= usize::from(refs == 0);\n",
        "",
    ),
    Mutant(
        "handed-out blocks are no references", "cache/pool.rs", "        self.counters.num_references += count;\n", ""
    ),
    Mutant("references taken together count as one", "cache/pool.rs", "blocks.len() * count as usize", "blocks.len()"),
    Mutant("references given back are counted on", "cache/pool.rs", "        self.counters.num_references -= 1;\n", ""),
    Mutant(
        "what is shared is counted by each who comes",
        "cache/pool.rs",
        "usize::from(before < 2 && before + count >= 2)",
        "usize::from(before + count >= 2)",
    ),
    Mutant(
        "what two take at once is not counted as shared",
        "cache/pool.rs",
        "usize::from(before < 2 && before + count >= 2)",
        "usize::from(before == 1)",
    ),
    Mutant(
        "what one holds is counted as shared",
        "cache/pool.rs",
        "        self.counters.num_shared -= usize::from(refs == 1);\n",
        "",
    ),
    Mutant(
        "of blocks handed out the free ones are counted", "cache/pool.rs", "+= count as u64;", "+= num_popped as u64;"
    ),
    Mutant("all that is handed out counts as evicted", "cache/pool.rs", "+= num_missing as u64;", "+= count as u64;"),
    # who may write
    Mutant(
        "copy-on-write dropped",
        "books/planner.rs",
        "|index: &usize| !self.pool.is_writable(sequence.block_table[*index])",
        "|_: &usize| false",
    ),
    Mutant(
        "copy-on-write without the copy",
        "books/planner.rs",
        "self.replace(row, index, target, index * block_size < start)?",
        "self.replace(row, index, target, false)?",
    ),
    Mutant(
        "copies of blocks of which nothing counts",
        "books/planner.rs",
        "self.replace(row, index, target, index * block_size < start)?",
        "self.replace(row, index, target, index * block_size <= start)?",
    ),
    Mutant(
        "only the first block to be written is made writable",
        "books/planner.rs",
        "let written = start / block_size..num_blocks.min(length);",
        "let written = start / block_size..(start / block_size + 1).min(length);",
    ),
    Mutant(
        "shared blocks are written",
        "cache/pool.rs",
        "self.ref_count(block) == 1 && self.index.past(block) == Past::None",
        "self.index.past(block) == Past::None",
    ),
    Mutant(
        "published blocks are written",
        "cache/pool.rs",
        "self.ref_count(block) == 1 && self.index.past(block) == Past::None",
        "self.ref_count(block) == 1",
    ),
    Mutant(
        "blocks that were published are written after a reset",
        "cache/pool.rs",
        "self.ref_count(block) == 1 && self.index.past(block) == Past::None",
        "self.ref_count(block) == 1 && self.index.past(block) != Past::Findable",
    ),
    Mutant("a reset block has no past", "cache/pool.rs", "self.index.drop_hash(block);", "self.index.forget(block);"),
    Mutant(
        "a reset block's past is never over",
        "cache/pool.rs",
        "        blocks.iter().for_each(|block| self.index.forget_past(*block));\n",
        "",
    ),
    Mutant(
        "fork without acquire",
        "books/planner.rs",
        "            self.pool.acquire(shared, num_children)?;\n",
        "            let _: u32 = num_children;\n",
    ),
    Mutant(
        "several forks acquire once",
        "books/planner.rs",
        "self.pool.acquire(shared, num_children)?",
        "self.pool.acquire(shared, num_children.min(1))?",
    ),
    Mutant(
        "a fork acquires what is behind its end",
        "books/planner.rs",
        "let shared = parent.blocks_of(fork.num_tokens as usize, self.geometry.block_size);",
        "let shared = &parent.block_table;",
    ),
    Mutant("forks after extends", "books/planner.rs", FORKS + EXTENDS, EXTENDS + FORKS),
    Mutant("trims after forks", "books/planner.rs", TRIMS + FORKS, FORKS + TRIMS),
    Mutant("admissions before extends", "books/planner.rs", EXTENDS + ADMISSIONS, ADMISSIONS + EXTENDS),
    Mutant(
        "a forked sequence still owns what it owned", "books/planner.rs", "            parent.num_writable = 0;\n", ""
    ),
    Mutant(
        "a failed sequence still owns what it owned",
        "books/sequences.rs",
        "        self.num_tokens = self.num_known();\n        self.num_writable = 0;\n",
        "        self.num_tokens = self.num_known();\n",
    ),
    Mutant(
        "a trimmed sequence still owns what it owned",
        "books/sequences.rs",
        "self.num_scheduled.min(num_tokens);\n        self.num_writable = 0;\n",
        "self.num_scheduled.min(num_tokens);\n",
    ),
    Mutant(
        "a sequence owns the blocks behind the one it got",
        "books/planner.rs",
        "self.geometry.num_slots(num_blocks, ",
        "self.geometry.num_slots(num_blocks + 1, ",
    ),
    Mutant(
        "longer than allowed in a block that was made writable",
        "books/planner.rs",
        "self.geometry.num_slots(num_blocks, sequence.reserved_tokens)",
        "num_blocks * block_size",
    ),
    Mutant(
        "longer than allowed in an admission's last block",
        "books/planner.rs",
        "geometry.num_slots(block_table.len(), admission.reserved_tokens)",
        "block_table.len() * geometry.block_size",
    ),
    Mutant(
        "longer than allowed by what is appended",
        "books/planner.rs",
        "end.max(sequence.num_known() + num_appended)",
        "end",
    ),
    Mutant(
        "longer than allowed by what is sampled",
        "books/planner.rs",
        "end.max(sequence.num_known() + num_appended)",
        "sequence.num_known() + num_appended",
    ),
    Mutant(
        "a decode needs no block",
        "books/planner.rs",
        "Some(row) if is_decode && self.has_slot(row) =>",
        "Some(row) if is_decode =>",
    ),
    Mutant(
        "a decode has a slot behind its own",
        "books/planner.rs",
        "sequence.num_scheduled < sequence.num_writable",
        "sequence.num_scheduled <= sequence.num_writable",
    ),
    Mutant(
        "a fork has no copy of the last token to compute",
        "books/sequences.rs",
        "self.num_scheduled.min(num_tokens - 1)",
        "self.num_scheduled.min(num_tokens)",
    ),
    Mutant(
        "a fork does not get the token being sampled",
        "books/steps.rs",
        "            self.also.entry(index).or_default().push(child);\n",
        "",
    ),
    Mutant(
        "a fork's fork does not get the token being sampled",
        "books/steps.rs",
        "                forks.push(child);\n",
        "",
    ),
    Mutant(
        "a fork gets a token behind its end",
        "books/steps.rs",
        "\n            && self.runs[index].sampled_position < num_tokens\n",
        "\n",
    ),
    Mutant(
        "a fork's fork gets a token behind its end",
        "books/steps.rs",
        "if forks.contains(&parent) && self.runs[*index].sampled_position < num_tokens {",
        "if forks.contains(&parent) {",
    ),
    Mutant(
        "a fork gets a token that its parent was trimmed of",
        "books/steps.rs",
        "            && self.runs[index].receives\n",
        "",
    ),
    Mutant(
        "a fork knows where a token behind its end was sampled",
        "books/sequences.rs",
        "sampled_position: self.sampled_position.filter(|position| *position < num_tokens),",
        "sampled_position: self.sampled_position,",
    ),
    Mutant(
        "a fork's copy of a published block is kept",
        "books/sequences.rs",
        "self.num_published.min(num_scheduled / block_size)",
        "self.num_published.min(num_tokens / block_size)",
    ),
    Mutant(
        "a fork's last token counts as computed",
        "books/sequences.rs",
        "num_computed: self.num_computed.min(num_scheduled)",
        "num_computed: self.num_computed",
    ),
    Mutant(
        "a fork was found in the cache as far as its parent",
        "books/sequences.rs",
        "num_cached: self.num_cached.min(num_scheduled)",
        "num_cached: self.num_cached",
    ),
    Mutant(
        "a fork of a token without a slot",
        "books/sequences.rs",
        "num_tokens.div_ceil(block_size).min(self.block_table.len())",
        "num_tokens.div_ceil(block_size)",
    ),
    Mutant(
        "a tail behind the table's end",
        "books/sequences.rs",
        "self.block_table[first.min(self.block_table.len())..]",
        "self.block_table[first..]",
    ),
    Mutant(
        "the tail trimmed stays in the table",
        "books/planner.rs",
        "        sequence.block_table.truncate(num_kept);\n",
        "",
    ),
    # what can be found
    Mutant(
        "published when planned",
        "books/planner.rs",
        "        self.step.expect_fill(",
        "        let num_full = end.min(self.table.get(row).num_known()) / self.geometry.block_size;\n"
        "        let (first, sequence) = (self.table.get(row).num_published, self.table.get_mut(row));\n"
        "        if num_full > first {\n"
        "            for (index, hash) in (first..).zip(sequence.take_hashes(num_full, self.geometry.block_size)) {\n"
        "                self.pool.publish(&hash, sequence.block_table[index]);\n"
        "            }\n"
        "        }\n"
        "        self.step.expect_fill(",
    ),
    Mutant(
        "published though the step failed",
        "books/settle.rs",
        "            self.doom_in_flight();\n",
        "            self.enter_computed(&step, &vec![0; step.runs.len()])?;\n            self.doom_in_flight();\n",
    ),
    Mutant(
        "a plan made after a failure still fails",
        "books/settle.rs",
        "            self.lease.known_step = step.step_number;\n",
        "",
    ),
    Mutant(
        "a report of a doomed step takes back what is known",
        "books/settle.rs",
        "self.lease.known_step.max(report.step_number)",
        "report.step_number",
    ),
    Mutant(
        "a doomed step dooms again",
        "books/settle.rs",
        "!step.runs.is_empty() && !step.is_doomed",
        "!step.runs.is_empty()",
    ),
    Mutant(
        "a failure of an empty step forgets what is in flight",
        "books/settle.rs",
        "!step.runs.is_empty() && !step.is_doomed",
        "!step.is_doomed",
    ),
    Mutant("a doomed step is taken as computed", "books/settle.rs", "            refuse_doomed(step)?;\n", ""),
    Mutant(
        "an empty doomed step is not taken as computed",
        "books/settle.rs",
        "!step.is_doomed || step.runs.is_empty()",
        "!step.is_doomed",
    ),
    Mutant(
        "a step before others is taken as the first",
        "books/settle.rs",
        "self.lease.in_flight.front().filter(|step| step.step_number == report.step_number)",
        "self.lease.in_flight.front()",
    ),
    Mutant(
        "reports taken twice", "books/settle.rs", "if report.step_number <= self.lease.settled_step {", "if false {"
    ),
    Mutant(
        "an evicted block can still be found",
        "cache/pool.rs",
        "                self.lose(*block, asker);\n",
        "",
    ),
    Mutant(
        "a forgotten block counts as findable",
        "cache/prefix.rs",
        "        self.remove(block);\n        self.past[block as usize] = Past::None;\n",
        "        self.remove(block);\n",
    ),
    Mutant(
        "a published block does not count as findable",
        "cache/prefix.rs",
        "        self.past[block as usize] = Past::Findable;\n",
        "",
    ),
    Mutant(
        "the block published last stands",
        "cache/prefix.rs",
        "        if let Some(standing) = self.lookup(hash) {\n            return standing;\n",
        "        if let Some(standing) = self.lookup(hash) {\n            self.forget(standing);\n",
    ),
    Mutant(
        "two blocks can be found by one hash",
        "cache/prefix.rs",
        "        if let Some(standing) = self.lookup(hash) {\n            return standing;\n        }\n",
        "",
    ),
    Mutant("a hole in the prefix is skipped", "cache/prefix.rs", "None => return found,", "None => (),"),
    Mutant(
        "a hole ends no more than what is looked up with it",
        "cache/prefix.rs",
        "None => return found,",
        "None => break,",
    ),
    Mutant(
        "a prefix ends where looking ahead does",
        "cache/prefix.rs",
        "hashes.chunks(LOOK_AHEAD)",
        "hashes.chunks(LOOK_AHEAD).take(1)",
    ),
    Mutant(
        "released head first", "books/sequences.rs", ".iter().rev().copied().collect()", ".iter().copied().collect()"
    ),
    Mutant(
        "unpinned head first",
        "cache/pool.rs",
        "            self.pins[block as usize] = pins;\n        }\n"
        "        self.journal.touch_all(blocks, &self.owners);\n        self.rest(blocks);\n",
        "            self.pins[block as usize] = pins;\n        }\n"
        "        self.rest(&blocks.iter().rev().copied().collect::<Vec<_>>());\n",
    ),
    Mutant(
        "cached blocks go before free ones",
        "cache/pool.rs",
        "let num_popped = count.min(self.free.len());",
        "let num_popped = count.saturating_sub(self.policy.num_parked());",
    ),
    Mutant(
        "tenant left out of the root",
        "cache/prefix.rs",
        "in [tenant, salt, model_fingerprint]",
        "in [salt, model_fingerprint]",
    ),
    Mutant(
        "salt left out of the root",
        "cache/prefix.rs",
        "in [tenant, salt, model_fingerprint]",
        "in [tenant, model_fingerprint]",
    ),
    Mutant(
        "model left out of the root", "cache/prefix.rs", "in [tenant, salt, model_fingerprint]", "in [tenant, salt]"
    ),
    Mutant(
        "a root without the parts' lengths",
        "cache/prefix.rs",
        "        root.update((part.len() as u64).to_le_bytes());\n",
        "",
    ),
    Mutant(
        "a lease's last root is every prompt's",
        "books/leases.rs",
        "if let Some((known, root)) = &self.last_root\n            && known == salt\n",
        "if let Some((_, root)) = &self.last_root\n",
    ),
    Mutant(
        "a lease looks up as nobody's tenant",
        "books/leases.rs",
        "let root = root_hash(&self.tenant_name, salt, model_fingerprint);",
        'let root = root_hash(b"", salt, model_fingerprint);',
    ),
    Mutant("hashes not chained", "cache/prefix.rs", "        content[..32].copy_from_slice(&parent);\n", ""),
    Mutant(
        "a tail that is not full has a hash",
        "cache/prefix.rs",
        "tokens.chunks_exact(block_size)",
        "tokens.chunks(block_size)",
    ),
    Mutant("token ids are hashed big end first", "cache/prefix.rs", "token.to_le_bytes()", "token.to_be_bytes()"),
    Mutant(
        "nothing left to compute of a cached prompt",
        "books/planner.rs",
        "{ (num_tokens - 1) / self.geometry.block_size }",
        "{ num_tokens / self.geometry.block_size }",
    ),
    Mutant(
        "a prefix is found without its state",
        "books/planner.rs",
        "if self.geometry.has_recurrent_state { 0 } else { (num_tokens",
        "if false { 0 } else { (num_tokens",
    ),
    Mutant("a prefix is published without its state", "books/settle.rs", " && !self.geometry.has_recurrent_state", ""),
    Mutant(
        "any state is there again",
        "books/planner.rs",
        "has_recurrent_state { sequence.oldest_state }",
        "has_recurrent_state { 0 }",
    ),
    Mutant(
        "no state is there again", "books/planner.rs", "sequence.oldest_state = end - 1", "sequence.oldest_state = end"
    ),
    Mutant(
        "the state of a step that failed is there",
        "books/sequences.rs",
        "        self.oldest_state = self.oldest_state.min(self.num_computed);\n",
        "",
    ),
    Mutant(
        "a lookup finds more than an admission",
        "books/mod.rs",
        "let num_usable = tokens.len().saturating_sub(1);",
        "let num_usable = tokens.len();",
    ),
    Mutant("nobody may look up nothing", "books/mod.rs", "tokens.len().saturating_sub(1)", "(tokens.len() - 1)"),
    Mutant("what a failed step was to fill is shared", "books/steps.rs", "        self.fills.clear();\n", ""),
    Mutant(
        "what was trimmed is shared as filled",
        "books/steps.rs",
        "        self.limit_fills(row, num_tokens / block_size);\n",
        "",
    ),
    Mutant(
        "a trim takes back what others fill",
        "books/steps.rs",
        "self.fills.iter_mut().filter(|fill| fill.row == row)",
        "self.fills.iter_mut()",
    ),
    Mutant(
        "what others write on is shared as filled", "books/steps.rs", "        self.limit_fills(row, num_blocks);\n", ""
    ),
    Mutant(
        "what others write on counts as computed",
        "books/steps.rs",
        "            run.end = run.end.min(num_blocks * block_size);\n",
        "",
    ),
    Mutant(
        "what is being sampled counts as filled",
        "books/steps.rs",
        "end.min(sequence.num_known()) / block_size",
        "end / block_size",
    ),
    Mutant(
        "what is being filled is shared after its release",
        "books/planner.rs",
        "Some(block) if self.is_shareable(block) =>",
        "Some(block) =>",
    ),
    Mutant(
        "what is being filled goes before what was published",
        "books/planner.rs",
        "self.pool.index().lookup(hash).or_else(|| self.find_filled(index, hash))",
        "self.find_filled(index, hash).or_else(|| self.pool.index().lookup(hash))",
    ),
    Mutant(
        "what was published ends where the first block is being filled",
        "books/planner.rs",
        "self.pool.index().lookup(hash).or_else(|| self.find_filled(index, hash))",
        "self.find_filled(index, hash)",
    ),
    Mutant("a hole in what is being filled is skipped", "books/planner.rs", "_ => break,", "_ => continue,"),
    Mutant(
        "what is being filled counts as published",
        "books/planner.rs",
        "        (found, num_published)\n",
        "        let num_found = found.len();\n        (found, num_found.max(num_published))\n",
    ),
    Mutant(
        "of what a step fills alike the last is shared",
        "books/planner.rs",
        "flat_map(|step| &step.fills)",
        "flat_map(|step| step.fills.iter().rev())",
    ),
    Mutant(
        "of what steps fill alike the last is shared",
        "books/planner.rs",
        "let steps = self.lease.in_flight.iter().chain([&self.step]);",
        "let steps = [&self.step].into_iter().chain(self.lease.in_flight.iter().rev());",
    ),
    Mutant(
        "what this plan fills is not shared",
        "books/planner.rs",
        "let steps = self.lease.in_flight.iter().chain([&self.step]);",
        "let steps = self.lease.in_flight.iter();",
    ),
    Mutant(
        "a block that is not filled to its end is shared",
        "books/planner.rs",
        "(fill.first..fill.end).contains(&index)",
        "(fill.first..=fill.end).contains(&index)",
    ),
    Mutant(
        "a released sequence publishes what others write on",
        "books/planner.rs",
        "            if self.pool.pin_count(block) > 0 {\n",
        "            if false {\n",
    ),
    Mutant(
        "a sequence that this plan releases publishes what others write on",
        "books/planner.rs",
        "let steps = || self.lease.in_flight.iter().chain([&self.step]);",
        "let steps = || self.lease.in_flight.iter();",
    ),
    Mutant(
        "a duplicate is swapped and nobody is told",
        "books/settle.rs",
        "        self.lease.table_changes.push((row, index));\n",
        "",
    ),
    Mutant(
        "duplicates are kept",
        "books/settle.rs",
        "if standing != sequence.block_table[index] && !sequence.released {",
        "if false {",
    ),
    Mutant(
        "a released sequence's duplicates are swapped",
        "books/settle.rs",
        "if standing != sequence.block_table[index] && !sequence.released {",
        "if standing != sequence.block_table[index] {",
    ),
    Mutant(
        "a duplicate is swapped without a reference",
        "books/settle.rs",
        "        self.pool.acquire(&[standing], 1)?;\n",
        "",
    ),
    Mutant(
        "changed entries of released sequences are written",
        "books/planner.rs",
        "if !sequence.released && index < sequence.block_table.len() {",
        "if index < sequence.block_table.len() {",
    ),
    Mutant(
        "changed entries are written again",
        "books/planner.rs",
        "std::mem::take(&mut self.lease.table_changes)",
        "self.lease.table_changes.clone()",
    ),
    Mutant(
        "full blocks are published late",
        "books/settle.rs",
        "if num_full > sequence.num_published &&",
        "if num_full > sequence.num_published + 1 &&",
    ),
    Mutant(
        "published again and again",
        "books/sequences.rs",
        "        self.num_published = num_full;\n        taken\n",
        "        taken\n",
    ),
    # resets
    Mutant(
        "the cache is reset but for the index",
        "cache/pool.rs",
        "            self.index.drop_hash(block);\n            if self.is_idle",
        "            if self.is_idle",
    ),
    Mutant(
        "the cache is reset but for the policy",
        "cache/pool.rs",
        "                self.parking.unpark(&[block]);\n"
        "                self.accounts.uncache(self.owners[block as usize], 1);\n",
        "                self.accounts.uncache(self.owners[block as usize], 1);\n",
    ),
    Mutant(
        "a reset frees what steps in flight use",
        "cache/pool.rs",
        "            if self.is_idle(block) {\n                self.parking",
        "            if self.ref_count(block) == 0 {\n                self.parking",
    ),
    Mutant("a reset leaves out its first block", "cache/pool.rs", "in first.max(1)..", "in first.max(1) + 1.."),
    Mutant(
        "a reset goes on to the last block",
        "cache/pool.rs",
        "..end.min(self.refs.len() as BlockId)",
        "..end.max(self.refs.len() as BlockId)",
    ),
    Mutant(
        "what could not be found counts as reset",
        "cache/pool.rs",
        NOT_FINDABLE + DROPPED,
        DROPPED + NOT_FINDABLE,
    ),
    # the index's table
    Mutant(
        "of an entry only its share of the hash is compared",
        "cache/prefix.rs",
        "(entry >> 32) as u32 == mixed && self.hashes[entry as u32 as usize] == *hash",
        "(entry >> 32) as u32 == mixed",
    ),
    Mutant(
        "an entry is looked for in one place only",
        "cache/prefix.rs",
        FOUND,
        FOUND + "            if place < self.mask {\n                return None;\n            }\n",
    ),
    Mutant(
        "a search does not go on from the first place",
        "cache/prefix.rs",
        FOUND + "            place = (place + 1) & self.mask;\n",
        FOUND + "            place = place + 1;\n",
    ),
    Mutant(
        "no entry goes from the last place to the first",
        "cache/prefix.rs",
        "while self.entries[place] != 0 {\n            place = (place + 1) & self.mask;\n",
        "while self.entries[place] != 0 {\n            place = place + 1;\n",
    ),
    Mutant(
        "an entry is put where another one is", "cache/prefix.rs", "while self.entries[place] != 0 {", "while false {"
    ),
    Mutant(
        "entries behind one taken out stay where they are",
        "cache/prefix.rs",
        "                self.entries[place] = entry;\n                place = next;\n",
        "",
    ),
    Mutant(
        "an entry behind one at its own place stays where it is",
        "cache/prefix.rs",
        "next.wrapping_sub(home) & self.mask >= next.wrapping_sub(place) & self.mask",
        "next.wrapping_sub(home) & self.mask > next.wrapping_sub(place) & self.mask",
    ),
    Mutant(
        "an entry moves up beyond its own place",
        "cache/prefix.rs",
        "if next.wrapping_sub(home) & self.mask >= next.wrapping_sub(place) & self.mask {",
        "if true {",
    ),
    Mutant(
        "entries move up as if the table had no end",
        "cache/prefix.rs",
        "next.wrapping_sub(home) & self.mask >= next.wrapping_sub(place) & self.mask",
        "home <= place",
    ),
    Mutant("an entry taken out is still there", "cache/prefix.rs", "        self.entries[place] = 0;\n", ""),
    Mutant("what is indexed is not counted", "cache/prefix.rs", "        self.num_indexed += 1;\n", ""),
    Mutant("what is forgotten is counted on", "cache/prefix.rs", "        self.num_indexed -= 1;\n", ""),
    Mutant("what is forgotten was never published", "cache/prefix.rs", "        self.num_forgotten += 1;\n", ""),
    # prefix hashes of a sequence
    Mutant(
        "hashes while decoding begin at the root",
        "books/sequences.rs",
        "let parent = self.hashes.last().copied().unwrap_or(self.last_hash);",
        "let parent = self.hashes.last().copied().unwrap_or(self.root);",
    ),
    Mutant(
        "hashes go on from the published ones twice",
        "books/sequences.rs",
        "let parent = self.hashes.last().copied().unwrap_or(self.last_hash);",
        "let parent = self.last_hash;",
    ),
    Mutant(
        "the last hash is one that is not published",
        "books/sequences.rs",
        "        self.last_hash = taken.last().copied().unwrap_or(self.last_hash);\n",
        "        self.last_hash = self.hashes.last().or(taken.last()).copied().unwrap_or(self.last_hash);\n",
    ),
    Mutant(
        "taken hashes are kept",
        "books/sequences.rs",
        "self.hashes.drain(..num_full - self.num_published).collect()",
        "self.hashes[..num_full - self.num_published].to_vec()",
    ),
    Mutant(
        "the hash of a reset block goes on from the last one",
        "books/sequences.rs",
        "chain_hashes(self.root, &self.tokens[..num_full * block_size]",
        "chain_hashes(self.last_hash, &self.tokens[..num_full * block_size]",
    ),
    Mutant(
        "the hash of no block is the last one",
        "books/sequences.rs",
        "            return self.root;\n",
        "            return self.last_hash;\n",
    ),
    Mutant(
        "the hash of a block is that of the next one",
        "books/sequences.rs",
        "index.hash(self.block_table[num_full - 1])",
        "index.hash(self.block_table[num_full])",
    ),
    Mutant(
        "a fork has hashes of tokens behind its end",
        "books/sequences.rs",
        "self.hashes[..num_hashes].to_vec()",
        "self.hashes.clone()",
    ),
    Mutant(
        "a fork goes on from its parent's last hash",
        "books/sequences.rs",
        "(self.prefix_hash(num_published, block_size, index), Vec::new())",
        "(self.last_hash, Vec::new())",
    ),
    Mutant(
        "hashes of trimmed tokens are kept",
        "books/sequences.rs",
        "            self.hashes.truncate(num_full - self.num_published);\n",
        "",
    ),
    Mutant("hashes of unpublished blocks are kept", "books/sequences.rs", "            self.hashes.clear();\n", ""),
    Mutant(
        "a trimmed sequence goes on from its last hash",
        "books/sequences.rs",
        "            self.last_hash = self.prefix_hash(num_full, block_size, index);\n",
        "",
    ),
    Mutant(
        "what is trimmed stays published",
        "books/sequences.rs",
        "            self.num_published = num_full;\n            self.hashes.clear();\n",
        "            self.hashes.clear();\n",
    ),
    Mutant(
        "what was found being filled counts as computed",
        "books/sequences.rs",
        "num_computed: num_published * block_size",
        "num_computed: num_cached_blocks * block_size",
    ),
    Mutant(
        "hashes of what was found being filled are left out",
        "books/sequences.rs",
        "hashes[num_published..].to_vec()",
        "hashes[num_cached_blocks..].to_vec()",
    ),
    Mutant(
        "hashes behind a cached prefix begin at the root",
        "books/sequences.rs",
        "if num_published > 0 { hashes[num_published - 1] } else { root }",
        "root",
    ),
    # steps and tokens
    Mutant("trimmed tokens stay known", "books/sequences.rs", "        self.tokens.truncate(num_tokens);\n", ""),
    Mutant(
        "trimmed tokens count as computed",
        "books/sequences.rs",
        "        self.num_computed = self.num_computed.min(num_tokens);\n",
        "",
    ),
    Mutant(
        "trimmed tokens count as scheduled",
        "books/sequences.rs",
        "        self.num_scheduled = self.num_scheduled.min(num_tokens);\n",
        "",
    ),
    Mutant(
        "trimmed tokens count as cached",
        "books/sequences.rs",
        "        self.num_cached = self.num_cached.min(num_tokens);\n",
        "",
    ),
    Mutant(
        "promised tokens kept after a failure",
        "books/sequences.rs",
        ".min(self.num_computed);\n        self.num_tokens = self.num_known();\n",
        ".min(self.num_computed);\n",
    ),
    Mutant(
        "scheduled tokens kept after a failure",
        "books/sequences.rs",
        "        self.num_scheduled = self.num_computed;\n",
        "",
    ),
    Mutant(
        "the sampled token kept after a failure",
        "books/sequences.rs",
        "        self.sampled_position = self.sampled_position.filter(|position| *position < self.tokens.len());\n",
        "",
    ),
    Mutant(
        "the sampled token forgotten with a failure",
        "books/sequences.rs",
        "self.sampled_position.filter(|position| *position < self.tokens.len())",
        "None",
    ),
    Mutant(
        "the sampled token kept after a trim",
        "books/sequences.rs",
        "        self.sampled_position = self.sampled_position.filter(|position| *position < num_tokens);\n",
        "",
    ),
    Mutant(
        "what is trimmed is still sampled",
        "books/steps.rs",
        "            run.receives &= run.sampled_position < num_tokens;\n",
        "",
    ),
    Mutant(
        "what a trim keeps is not sampled",
        "books/steps.rs",
        "run.receives &= run.sampled_position < num_tokens;",
        "run.receives = false;",
    ),
    Mutant(
        "what is trimmed off a fork is still sampled",
        "books/steps.rs",
        "                forks.retain(|fork| *fork != row);\n",
        "",
    ),
    Mutant(
        "what a trim keeps of a fork is not sampled",
        "books/steps.rs",
        "if self.runs[*index].sampled_position >= num_tokens {",
        "if true {",
    ),
    Mutant("computed beyond a trim", "books/steps.rs", "            run.end = run.end.min(num_tokens);\n", ""),
    Mutant(
        "sampled tokens go to the first runs",
        "books/settle.rs",
        "if step.runs.iter().map(|run| run.seq_id).eq(report.sampled_ids.iter().copied()) {",
        "if report.sampled_ids.len() <= step.runs.len() {",
    ),
    Mutant(
        "sampled tokens are taken in the order of the runs",
        "books/settle.rs",
        "if step.runs.iter().map(|run| run.seq_id).eq(report.sampled_ids.iter().copied()) {",
        "if report.sampled_ids.len() == step.runs.len() {",
    ),
    Mutant(
        "forks get the first run's token",
        "books/settle.rs",
        "append_promised(tokens[*index])",
        "append_promised(tokens[0])",
    ),
    Mutant(
        "a report may leave out a fork's token",
        "books/steps.rs",
        "(run.receives || is_wanted(*index))",
        "run.receives",
    ),
    Mutant(
        "a report may leave out a token that only the run waits for",
        "books/steps.rs",
        "(run.receives || is_wanted(*index))",
        "is_wanted(*index)",
    ),
    Mutant(
        "a report has tokens nobody waits for",
        "books/steps.rs",
        "(run.receives || is_wanted(*index)) &&",
        "",
    ),
    Mutant(
        "a report of other runs is taken",
        "books/settle.rs",
        "planned.eq(reported)",
        "planned.count() == reported.count()",
    ),
    Mutant(
        "a report with counts left over is taken",
        "books/settle.rs",
        "report.seq_ids.len() == report.token_counts.len() && ",
        "",
    ),
    Mutant(
        "a sampled token is the first behind the vocabulary",
        "books/settle.rs",
        "**token as u32 as usize >= vocab_size",
        "**token as u32 as usize > vocab_size",
    ),
    Mutant(
        "a token is the first behind the vocabulary",
        "books/room.rs",
        "*token as u32 as usize >= geometry.vocab_size",
        "*token as u32 as usize > geometry.vocab_size",
    ),
    Mutant(
        "wrong tokens in a digest",
        "books/planner.rs",
        "digest_of(&sequence.tokens[start..end])",
        "digest_of(&sequence.tokens[..end])",
    ),
    Mutant(
        "another token than the sampled one is not given",
        "books/planner.rs",
        "sequence.sampled_position != Some(start) || num_tokens > 1",
        "num_tokens > 1",
    ),
    Mutant(
        "tokens behind the sampled one are not given",
        "books/planner.rs",
        "sequence.sampled_position != Some(start) || num_tokens > 1",
        "sequence.sampled_position != Some(start)",
    ),
    Mutant("what is appended to a decode is lost", "books/planner.rs", "            && extend.append.is_empty()\n", ""),
    Mutant(
        "several tokens pass for a decode",
        "books/planner.rs",
        "        extend.num_tokens == 1\n            && extend",
        "        extend",
    ),
    Mutant(
        "tokens may follow those being sampled",
        "books/planner.rs",
        "        if sequence.num_promised() > 0 {\n",
        "        if false {\n",
    ),
    Mutant(
        "tokens appended are no tokens to compute",
        "books/planner.rs",
        "let num_known = sequence.num_known() + num_appended;",
        "let num_known = sequence.num_known();",
    ),
    Mutant(
        "a token being sampled can't be computed",
        "books/planner.rs",
        ".max(usize::from(is_sampled))",
        "",
    ),
    Mutant(
        "a token that was trimmed can be computed",
        "books/planner.rs",
        "sequence.sampled_position == Some(start) && start < sequence.num_tokens",
        "start <= sequence.num_tokens",
    ),
    Mutant(
        "a run that ends before its sequence samples",
        "books/planner.rs",
        "let samples = sequence.num_tokens == end;",
        "let samples = sequence.num_tokens >= end;",
    ),
    Mutant(
        "the token being sampled is not promised",
        "books/planner.rs",
        "            sequence.num_tokens = end + 1;\n",
        "",
    ),
    Mutant(
        "decodes go before what comes first", "books/planner.rs", "ready.push((row, 1))", "ready.insert(0, (row, 1))"
    ),
    Mutant(
        "budget ignored", "books/planner.rs", "        self.budget = self.budget.map(|budget| budget - count);\n", ""
    ),
    Mutant(
        "what a prompt may compute ignored",
        "books/planner.rs",
        "[(max_compute > 0).then_some(max_compute), self.budget]",
        "[None, self.budget]",
    ),
    Mutant(
        "an empty budget is a limit",
        "books/planner.rs",
        "(request.admission_token_budget > 0).then_some(request.admission_token_budget)",
        "Some(request.admission_token_budget)",
    ),
    Mutant(
        "a sequence that left is found",
        "books/planner.rs",
        "        self.lease.sequences.remove(&sequence.seq_id);\n",
        "",
    ),
    Mutant(
        "a sequence is found by its id's lower half",
        "books/planner.rs",
        "i32::try_from(seq_id).ok().and_then(|seq_id| self.lease.sequences.get(&seq_id).copied())",
        "self.lease.sequences.get(&(seq_id as i32)).copied()",
    ),
    Mutant(
        "a sequence more than there is room for",
        "books/room.rs",
        "if table.len() < limit {",
        "if table.len() <= limit {",
    ),
    Mutant("the first of ids is refused", "books/planner.rs", "(0..=MAX_SEQUENCE_ID)", "(1..=MAX_SEQUENCE_ID)"),
    Mutant(
        "a position behind the last one is taken",
        "books/planner.rs",
        "(least as i64..=limit as i64)",
        "(least as i64..=limit as i64 + 1)",
    ),
    Mutant("a write is of one block", "books/plans.rs", "push(blocks.len() as u32)", "push(1)"),
    Mutant("the next step has this one's number", "books/planner.rs", "        self.lease.next_step += 1;\n", ""),
    Mutant(
        "the plan's counts are of before", "books/planner.rs", "        self.plan.counts = self.pool.counts();\n", ""
    ),
    Mutant("a step more in flight than allowed", "books/leases.rs", "num_steps < MAX_STEPS", "num_steps <= MAX_STEPS"),
    Mutant("a sequence is extended twice", "books/leases.rs", "        refuse_repeated(request)?;\n", ""),
    Mutant("a sequence is extended twice, not in succession", "books/plans.rs", "    seq_ids.sort_unstable();\n", ""),
    # what was counted
    Mutant(
        "forks count as one",
        "books/planner.rs",
        "self.counters.forks += u64::from(num_children);",
        "self.counters.forks += 1;",
    ),
    Mutant("copies are not counted", "books/planner.rs", "        self.counters.copied_blocks += 1;\n", ""),
    Mutant(
        "all that is admitted counts as cached",
        "books/counters.rs",
        "*cached_tokens += num_cached as u64",
        "*cached_tokens += num_tokens as u64",
    ),
    Mutant(
        "skipped steps count as failed",
        "books/settle.rs",
        "self.counters.skipped_steps += 1",
        "self.counters.failed_steps += 1",
    ),
    Mutant(
        "a block that one fills and another does not holds few tokens",
        "books/mod.rs",
        "fills.keys().any(|block| self.pool.ref_count(*block) > 1)",
        "false",
    ),
    Mutant(
        "tokens being computed are not held",
        "books/mod.rs",
        "sequence.num_known().max(sequence.num_scheduled)",
        "sequence.num_known()",
    ),
    Mutant(
        "a block's tokens are those of who fills it least",
        "books/mod.rs",
        "num_tokens.saturating_sub(index * size).max(*fill)",
        "num_tokens.saturating_sub(index * size).min(*fill)",
    ),
    # eviction
    Mutant(
        "most recently used is evicted first",
        "cache/lru.rs",
        "let block = self.ring.first(NULL_BLOCK);",
        "let block = self.ring.prev[NULL_BLOCK as usize];",
    ),
    Mutant("parked blocks are linked one way", "cache/rings.rs", "        self.prev[node as usize] = before;\n", ""),
    Mutant("a ring's end is its first node", "cache/rings.rs", "        self.prev[sentinel as usize] = node;\n", ""),
    Mutant(
        "blocks are taken out of the ring one too far",
        "cache/rings.rs",
        "        self.next[before as usize] = after;\n        self.prev[after as usize]",
        "        let after = self.next[after as usize];\n        self.next[before as usize] = after;\n"
        "        self.prev[after as usize]",
    ),
    Mutant(
        "the ring's head has an evicted block before it",
        "cache/rings.rs",
        "        self.prev[after as usize] = before;\n",
        "",
    ),
    Mutant(
        "what is unparked is counted under LRU",
        "cache/lru.rs",
        "        blocks.iter().for_each(|block| self.ring.remove(*block));\n        self.num_parked -= blocks.len();\n",
        "        blocks.iter().for_each(|block| self.ring.remove(*block));\n",
    ),
    Mutant(
        "what is evicted is counted under LRU",
        "cache/lru.rs",
        "        self.num_parked -= count;\n",
        "",
    ),
    Mutant(
        "what is unparked is counted by the default",
        "cache/lineage.rs",
        REMOVED + UNCOUNTED,
        REMOVED,
    ),
    Mutant("what is evicted is counted by the default", "cache/lineage.rs", "        self.num_parked -= count;\n", ""),
    Mutant(
        "a parent is kept shorter than its child",
        "cache/lineage.rs",
        "place = place.max(self.segment(number).place).max(worth);",
        "place = worth;",
    ),
    Mutant(
        "what continues a prefix is forgotten with its next use",
        "cache/lineage.rs",
        "place = place.max(self.segment(number).place).max(worth);",
        "place = place.max(worth);",
    ),
    Mutant(
        "blocks evicted by the default keep their segment",
        "cache/lineage.rs",
        "            self.segment_of[block as usize] = UNKNOWN;\n            victims",
        "            victims",
    ),
    Mutant(
        "free blocks keep their segment",
        "cache/parking.rs",
        "        self.policy.forget(blocks);\n",
        "",
    ),
    Mutant(
        "a plan that is not trusted is followed",
        "cache/lineage.rs",
        "if self.planner.is_trusted { planned } else { BASE_TIME }",
        "planned",
    ),
    Mutant(
        "the share is of those kept short",
        "cache/lineage.rs",
        "< choice.share * 65_536.0",
        ">= choice.share * 65_536.0",
    ),
    Mutant(
        "what nothing is known of goes last",
        "cache/lineage.rs",
        "if self.rings.first(unknown) != unknown {",
        "if false {",
    ),
    Mutant(
        "of times that end at once the parent's goes first",
        "cache/lineage.rs",
        "for place in (0..NUM_TIMES).rev() {",
        "for place in 0..NUM_TIMES {",
    ),
    Mutant(
        "a time ends at once", "cache/lineage.rs", "parked_at as f64 + self.planner.time(place)", "parked_at as f64"
    ),
    Mutant(
        "a time begins with the pool", "cache/lineage.rs", "            self.segment(number).parked_at = clock;\n", ""
    ),
    Mutant(
        "blocks of other segments go with the first",
        "cache/lineage.rs",
        "if block == ring || self.segment_of(block) != number {",
        "if block == ring {",
    ),
    Mutant("what is evicted stays in its segment", "cache/lineage.rs", "        segment.num_blocks -= count;\n", ""),
    Mutant(
        "what is evicted is not told at the next use", "cache/lineage.rs", "        segment.num_evicted += count;\n", ""
    ),
    Mutant("what was evicted is told at each use", "cache/lineage.rs", "        segment.num_evicted = 0;\n", ""),
    Mutant(
        "what leaves a segment is counted in it",
        "cache/lineage.rs",
        "                self.segment(old).num_blocks -= 1;\n",
        "",
    ),
    Mutant("a segment that was cut begins at its root", "cache/lineage.rs", "        lower.start = end as u32;\n", ""),
    Mutant("a segment that was cut keeps its key", "cache/lineage.rs", "        lower.key = 0;\n", ""),
    Mutant(
        "the upper part of a segment has the blocks of both",
        "cache/lineage.rs",
        "Segment { num_blocks: 0, num_evicted: 0, is_forked: true, ..whole }",
        "Segment { num_evicted: 0, is_forked: true, ..whole }",
    ),
    Mutant(
        "what continues a fork is the fork's",
        "cache/lineage.rs",
        "Some(&last) if !self.segment(last).is_forked =>",
        "Some(&last) =>",
    ),
    Mutant(
        "a prompt that leaves a segment does not cut it",
        "cache/lineage.rs",
        "if start + self.segment(number).num_blocks as usize > end {",
        "if false {",
    ),
    Mutant(
        "blocks without a segment have one each",
        "cache/lineage.rs",
        "while start > 0 && self.segment_of(found[start - 1]) == UNKNOWN {",
        "while false {",
    ),
    Mutant(
        "blocks come to rest in the segment of the one before",
        "cache/lineage.rs",
        "for block in blocks.iter().rev() {\n            if self.segment_of",
        "for block in blocks.iter() {\n            if self.segment_of",
    ),
    Mutant(
        "blocks that came while a sequence ran take no time",
        "cache/lineage.rs",
        "                self.clock += 1;\n",
        "",
    ),
    Mutant(
        "fresh blocks take no time", "cache/lineage.rs", "self.clock = now + fresh.len() as i64;", "self.clock = now;"
    ),
    Mutant("a tail that can't be found is counted", "cache/lineage.rs", "i64::from(has_tail)", "0"),
    Mutant("every segment has a tail that can't be found", "cache/lineage.rs", "            num_uncounted = 0;\n", ""),
    Mutant(
        "a revived segment is a new one",
        "cache/lineage.rs",
        "Some(ghost) => self.revive(number, &ghost, now),",
        "Some(_) => class_of_new(end - first, start > 0),",
    ),
    Mutant(
        "a revived segment has all that is fresh",
        "cache/lineage.rs",
        "Some(ghost) if ghost.is_forked =>",
        "Some(ghost) if false && ghost.is_forked =>",
    ),
    Mutant(
        "a revived segment was never forked", "cache/lineage.rs", "        segment.is_forked = ghost.is_forked;\n", ""
    ),
    Mutant(
        "a revived segment returns with blocks it does not have",
        "cache/lineage.rs",
        "ghost.num_blocks.min(self.segment(number).num_blocks)",
        "ghost.num_blocks",
    ),
    Mutant("a revived segment was used once", "cache/lineage.rs", "MOST_USES.min(ghost.num_uses + 1)", "2"),
    Mutant(
        "uses are counted without end",
        "cache/lineage.rs",
        "MOST_USES.min(segment.num_uses + 1)",
        "segment.num_uses + 1",
    ),
    Mutant("a ghost told again is forgotten", "cache/lineage.rs", "            *known = ghost;\n", ""),
    Mutant(
        "the oldest ghost may be one that came anew",
        "cache/lineage.rs",
        "is_some_and(|(known, _)| *known == number)",
        "is_some()",
    ),
    Mutant(
        "of many ghosts the order is lost",
        "cache/lineage.rs",
        "self.order.retain(|(number, key)| self.by_key.get(key).is_some_and(|(known, _)| known == number))",
        "self.order.clear()",
    ),
    Mutant("ghosts without end", "cache/lineage.rs", "if self.ghosts.len() > self.most_ghosts\n", "if false\n"),
    Mutant(
        "all segments are observed whatever it costs",
        "cache/lineage.rs",
        "self.sampling = self.sampling * 2 + 1;",
        "self.sampling *= 2;",
    ),
    Mutant("an observed segment stands for itself only", "cache/lineage.rs", "self.sampling as i64 + 1", "1"),
    # what is worth keeping
    Mutant("a gap as long as a time is longer", "cache/retention.rs", "(gap * 16 - 1)", "(gap * 16)"),
    Mutant(
        "the third use is the second", "cache/retention.rs", "usize::from(num_uses > 2)", "usize::from(num_uses > 3)"
    ),
    Mutant(
        "small segments are large", "cache/retention.rs", "num_blocks > SMALL_SEGMENT", "num_blocks >= SMALL_SEGMENT"
    ),
    Mutant(
        "LRU would have kept all",
        "cache/retention.rs",
        "if event.gap as f64 <= self.lru_time { event.weight } else { 0 }",
        "event.weight",
    ),
    Mutant(
        "a trusted plan is judged by what it promised",
        "cache/retention.rs",
        "if self.is_trusted { event.found } else { promised }",
        "promised",
    ),
    Mutant(
        "nothing is learned of what was evicted",
        "cache/retention.rs",
        "self.parked_evicted += count as f64 * num_parked as f64;",
        "self.parked_evicted += num_parked as f64;",
    ),
    Mutant(
        "plans are made all the time", "cache/retention.rs", "if is_busy { LEAST_PERIOD } else { MOST_PERIOD }", "1"
    ),
    Mutant(
        "plans wait though there is much to do",
        "cache/retention.rs",
        "if is_busy { LEAST_PERIOD } else { MOST_PERIOD }",
        "MOST_PERIOD",
    ),
    Mutant(
        "a plan is trusted without a gain predicted",
        "cache/retention.rs",
        "planned >= LEAST_PREDICTED_GAIN * lru_hits\n            && ",
        "",
    ),
    Mutant(
        "a plan is trusted by chance",
        "cache/retention.rs",
        "self.gain > SHOWN_DEVIATIONS * self.gain_squares.sqrt()",
        "self.gain > 0.0",
    ),
    Mutant(
        "a plan is trusted for little",
        "cache/retention.rs",
        "\n            && self.gain >= LEAST_SHOWN_GAIN * self.lru_hits",
        "",
    ),
    Mutant(
        "a plan is trusted for ever",
        "cache/retention.rs",
        "        } else {\n            self.is_trusted = false;\n        }\n",
        "        }\n",
    ),
    Mutant(
        "nothing fades", "cache/retention.rs", "        self.used.iter_mut().for_each(|weight| *weight *= FADE);\n", ""
    ),
    Mutant(
        "a class is what was seen of it",
        "cache/retention.rs",
        "let prior = PRIOR_EVENTS * total",
        "let prior = 0.0 * total",
    ),
    Mutant(
        "a hull goes through every time",
        "cache/retention.rs",
        "if (hits[place] - hits[b]) * run < rise * (held[place] - held[b]) {",
        "if true {",
    ),
    Mutant(
        "the flattest piece goes first",
        "cache/retention.rs",
        "b.density.total_cmp(&a.density)",
        "a.density.total_cmp(&b.density)",
    ),
    Mutant("the last piece is taken whole", "cache/retention.rs", "share: room / piece.num_blocks", "share: 1.0"),
    Mutant("what is kept takes no room", "cache/retention.rs", "        room -= piece.num_blocks;\n", ""),
    Mutant(
        "a plan's share brings nothing",
        "cache/retention.rs",
        "(1.0 - choice.share) * curve.hits[choice.low] + choice.share * curve.hits[choice.high]",
        "curve.hits[choice.low]",
    ),
    Mutant(
        "one time for all is one of the list",
        "cache/retention.rs",
        "let share = (room - last_held) / (held - last_held);",
        "let share = 0.0;",
    ),
    # what the books say of themselves
    Mutant("wrong references are not told", "books/audit.rs", "if references != holders {", "if false {"),
    Mutant("wrong pins are not told", "books/audit.rs", "if pins != steps {", "if false {"),
    Mutant("wrong rows are not told", "books/audit.rs", "if num_taken != self.num_rows() {", "if false {"),
    Mutant("wrong counters are not told", "cache/pool.rs", "if counters != self.counters {", "if false {"),
    Mutant(
        "a holder of the null block is not told",
        "cache/pool.rs",
        "if self.ref_count(NULL_BLOCK) + self.pin_count(NULL_BLOCK) > 0 {",
        "if false {",
    ),
    Mutant(
        "wrong sharing is not told",
        "books/audit.rs",
        "if is_same_place && sequence.root == other.root && is_same_prefix() {",
        "if true {",
    ),
    Mutant("a block at two places of tables is not told", "books/audit.rs", "index == other_index;", "true;"),
    Mutant(
        "blocks behind what is filled are compared too",
        "books/audit.rs",
        "sequence.blocks_of(num_filled, size).iter()",
        "sequence.block_table.iter()",
    ),
    Mutant(
        "holders of a block are compared with the first one alone",
        "books/audit.rs",
        "if filled > other_filled {",
        "if false {",
    ),
    Mutant("sharing under another salt is not told", "books/audit.rs", "sequence.root == other.root && ", ""),
    Mutant(
        "a slice begins with the first block",
        "books/audit.rs",
        "times.get_mut(block.wrapping_sub(blocks.start) as usize)",
        "times.get_mut(*block as usize)",
    ),
    Mutant(
        "a slice's free blocks begin with the first block",
        "cache/pool.rs",
        "times_free.get_mut(block.wrapping_sub(blocks.start) as usize)",
        "times_free.get_mut(*block as usize)",
    ),
    Mutant(
        "a wrong free stack is not told",
        "cache/pool.rs",
        "if times != u32::from(state == BlockState::Free && block != NULL_BLOCK) {",
        "if false {",
    ),
    Mutant(
        "a block that is free twice is not told",
        "cache/pool.rs",
        "                *times += 1;\n",
        "                *times = 1;\n",
    ),
    Mutant(
        "what is parked wrongly is not told",
        "cache/parking.rs",
        "if places != [should_be && !is_advised, should_be && is_advised] {",
        "if false {",
    ),
    Mutant(
        "a free block's past is not told",
        "cache/pool.rs",
        "state == BlockState::Free && self.index.past(block) != Past::None",
        "false",
    ),
    Mutant(
        "a wrong count of the parked is not told",
        "cache/pool.rs",
        "if self.counts().cached != num_cached {",
        "if false {",
    ),
    Mutant(
        "a hash that finds nothing is not told",
        "cache/prefix.rs",
        "if self.lookup(&self.hashes[block as usize]) != Some(block) {",
        "if false {",
    ),
    Mutant(
        "an entry of no block is not told",
        "cache/prefix.rs",
        "if self.entries[place] != 0 && !self.is_findable(block) {",
        "if false {",
    ),
    Mutant(
        "a wrong count of the index is not told",
        "cache/prefix.rs",
        "if num_findable != self.num_indexed {",
        "if false {",
    ),
    Mutant("what is alone is in a ring", "cache/rings.rs", "after != node && ", ""),
    Mutant(
        "what only one neighbour knows is in a ring", "cache/rings.rs", "self.next[before as usize] == node && ", ""
    ),
    # between Python and Rust
    Mutant("numbers cut short are taken", "python.rs", "if !rest.is_empty() {", "if false {"),
    Mutant("a token not sampled is the first", "python.rs", "position.map_or(-1,", "position.map_or(0,"),
    Mutant(
        "a failed step is skipped", "python.rs", '"failed" => StepOutcome::Failed', '"failed" => StepOutcome::Skipped'
    ),
    Mutant(
        "all that was allocated counts as evicted",
        "python.rs",
        '("num_evicted", pool.num_evicted)',
        '("num_evicted", pool.num_allocated)',
    ),
    # calls
    Mutant(
        "request_id ignored",
        "books/leases.rs",
        "known.iter().find(|answer| answer.request_id == request_id)",
        "known.iter().find(|answer| answer.request_id == request_id && false)",
    ),
    Mutant("a reused request_id gets the old answer", "books/leases.rs", "if answer.digest != digest {", "if false {"),
    Mutant("answers are remembered for ever", "books/leases.rs", "                holdings.answers.pop_front();\n", ""),
    Mutant(
        "the last answer is forgotten first",
        "books/leases.rs",
        "holdings.answers.pop_front()",
        "holdings.answers.pop_back()",
    ),
    Mutant("an empty request_id is remembered", "store/stored_books.rs", "if !request_id.is_empty() {", "if true {"),
    # what is written down
    Mutant(
        "a plan is not written down", "store/stored_books.rs", "        if self.is_stored() {\n", "        if false {\n"
    ),
    Mutant(
        "a report is written down without its number",
        "store/stored_books.rs",
        "report: Cow::Borrowed(report), report_number })\n",
        "report: Cow::Borrowed(report), report_number: 0 })\n",
    ),
    Mutant(
        "a report's number is lost",
        "store/stored_books.rs",
        "self.last_report = self.last_report.max(report_number);",
        "",
    ),
    Mutant(
        "what a refused plan has done is not written down",
        "store/stored_books.rs",
        "                self.write(&Record::Advance { now })?; // that much was done\n",
        "",
    ),
    Mutant(
        "a pin is not written down",
        "store/stored_books.rs",
        "        if pin.is_ok() {\n            self.write(",
        "        if false {\n            self.write(",
    ),
    Mutant(
        "a pin taken back is not written down",
        "store/stored_books.rs",
        "        if is_gone {\n            self.write(",
        "        if false {\n            self.write(",
    ),
    Mutant(
        "a reset is not written down",
        "store/stored_books.rs",
        "        self.write(&Record::Reset { first, end, now })?;\n",
        "",
    ),
    Mutant(
        "who only asks is not written down",
        "store/stored_books.rs",
        "        self.make(&Record::EnterTenant { name: name.into() })\n",
        "        self.reported.apply(&Record::EnterTenant { name: name.into() })\n",
    ),
    Mutant(
        "a change is made and not written down",
        "store/stored_books.rs",
        "        self.write(record)\n",
        "        Ok(())\n",
    ),
    Mutant(
        "a plan that comes out otherwise is taken",
        "store/changes.rs",
        "if plan.as_ref().map(|plan| plan.checksum()) != Some(*checksum) {",
        "if plan.is_none() && *checksum == 7 {",
    ),
    Mutant(
        "a store that failed is left there",
        "store/stored_books.rs",
        "if let Err(worse) = store.discard() {",
        "if let Err(worse) = Ok::<(), String>(drop(store)) {",
    ),
    Mutant("a failed store is not told", "store/stored_books.rs", "        self.loss = Some(error);\n", ""),
    Mutant(
        "an ended lease is open again",
        "books/mod.rs",
        "            holdings.is_ending = true;\n",
        "            holdings.is_ending = false;\n",
    ),
    Mutant(
        "a damaged record is taken",
        "store/files.rs",
        "    if crc32fast::hash(content).to_le_bytes() != *crc {\n        return None;\n    }\n",
        "",
    ),
    Mutant(
        "a torn end is left out",
        "store/files.rs",
        'next_record(rest).ok_or("it is torn or damaged")?',
        "match next_record(rest) {\n            Some(found) => found,\n            None => break,\n        }",
    ),
    Mutant(
        "a damaged snapshot is taken",
        "store/files.rs",
        ".filter(|(books, crc)| crc32fast::hash(books).to_le_bytes() == **crc)",
        ".filter(|(books, _)| !books.is_empty())",
    ),
    Mutant(
        "a hole between logs is passed over",
        "store/files.rs",
        'Some((_, missing)) => Err(format!("log {missing} is missing")),',
        "Some((_, missing)) if missing == u64::MAX => Err(String::new()),\n        Some(_) => Ok(logs),",
    ),
    Mutant(
        "what a snapshot replaces stays", "store/files.rs", "    remove_before(directory, last + 1)\n", "    Ok(())\n"
    ),
    Mutant(
        "a snapshot leaves out the last log",
        "store/files.rs",
        "let (books, _) = read_books(directory, first, last)?;",
        "let (books, _) = read_books(directory, first, last.saturating_sub(1).max(first))?;",
    ),
    Mutant(
        "no snapshot is ever made",
        "store/files.rs",
        "if is_long { self.begin_next() } else { Ok(()) }",
        "if is_long { Ok(()) } else { Ok(()) }",
    ),
    Mutant(
        "an index is read without its entries",
        "cache/prefix.rs",
        "            if index.is_findable(block) {\n                index.enter(",
        "            if index.is_findable(block) && block == 0 {\n                index.enter(",
    ),
    Mutant(
        "epoch not checked",
        "ledger.py",
        "        if epoch == self.epoch:\n            return\n",
        "        if True:\n            return\n",
    ),
    Mutant(
        "an ended lease goes on planning",
        "ledger.py",
        "        if lease is None or lease.state is not LeaseState.OPEN:\n            raise",
        "        if lease is None:\n            raise",
    ),
    Mutant(
        "an ended lease is open",
        "ledger.py",
        "return lease is not None and lease.state is LeaseState.OPEN",
        "return lease is not None",
    ),
    Mutant("extends without counts are taken", "ledger.py", "if len(extend_ids) != len(token_counts):", "if False:"),
    Mutant(
        "as many tokens are computed as the sequence's id says",
        "ledger.py",
        "extend_token_counts=token_counts,",
        "extend_token_counts=extend_ids,",
    ),
    Mutant(
        "refusals are not counted",
        "ledger.py",
        "            self._refusals.update(refused.refusal.reason for refused in plan.refusals)\n",
        "            pass\n",
    ),
    Mutant("a plan does not renew its lease", "ledger.py", "        lease.renew(now)\n", ""),
    Mutant(
        "a renewal does not count", "leases.py", "            if lease.expires_at > now:\n", "            if False:\n"
    ),
    Mutant(
        "an early entry is not put back", "leases.py", "                self.add(lease)\n", "                pass\n"
    ),
    Mutant(
        "a lease that was fenced expires, too",
        "leases.py",
        "if lease is None or lease.state is not LeaseState.OPEN:",
        "if lease is None:",
    ),
    # what is bounded, and by how much
    Mutant(
        "entries of leases that ended pile up",
        "leases.py",
        "if entry[2].state is LeaseState.OPEN]",
        "]",
    ),
    Mutant(
        "open leases are dropped from the queue with those that ended",
        "leases.py",
        "if entry[2].state is LeaseState.OPEN]",
        "if False]",
    ),
    Mutant("the queue is looked through only once", "leases.py", "max(SPARE_ENTRIES, 2 * len(self._entries))", "2**62"),
    Mutant(
        "one place more than there are",
        "bounds.py",
        "if self.num_taken >= self._limit:",
        "if self.num_taken > self._limit:",
    ),
    Mutant("a place is never free again", "bounds.py", "            self.num_taken -= 1\n", "            pass\n"),
    Mutant(
        "one lease more than a tenant may have",
        "bounds.py",
        "len(self._leases.get(tenant, ())) >= limit:",
        "len(self._leases.get(tenant, ())) > limit:",
    ),
    Mutant(
        "one lease more than there may be",
        "bounds.py",
        "if self._num_leases >= self._limit:",
        "if self._num_leases > self._limit:",
    ),
    Mutant("a tenant without leases has no limit", "bounds.py", "if limit is not None and", "if limit and"),
    Mutant("leases that ended count", "bounds.py", "            self._recount()\n", ""),
    Mutant(
        "who is refused counts all leases again",
        "bounds.py",
        "            self._recounted_at = now\n",
        "",
    ),
    Mutant(
        "tenants whose leases are gone stay in the sum",
        "bounds.py",
        "        self._num_leases = sum(map(len, self._leases.values()))\n",
        "",
    ),
    Mutant("more admissions wait than may", "servicer.py", "if len(self._waiting) >= self._limit:", "if False:"),
    Mutant(
        "a call that still runs is forgotten for another one",
        "servicer.py",
        "for key, (_, _, answer) in self._calls.items() if answer.done()), None)",
        "for key, (_, _, answer) in self._calls.items()), None)",
    ),
    Mutant(
        "a tenant gets another one's lease",
        "servicer.py",
        "key = tenant, request.request_id",
        'key = "", request.request_id',
    ),
    Mutant(
        "what was answered is never forgotten",
        "servicer.py",
        "        if len(self._calls) < self._limit:\n",
        "        if True:\n",
    ),
    Mutant(
        "children of forks are not counted",
        "messages.py",
        "sum(len(fork.child_sequence_ids) for fork in request.forks)",
        "len(request.forks)",
    ),
    Mutant(
        "one entry more than a list may have",
        "messages.py",
        "    if size > most:\n",
        "    if size > most + 1:\n",
    ),
    Mutant(
        "as many entries as a list may have are too many",
        "messages.py",
        "    if size > most:\n",
        "    if size >= most:\n",
    ),
    Mutant(
        "a plan may have more items than the pool has room for",
        "messages.py",
        "    most = min(geometry.max_sequences, MAX_PLAN_ITEMS)\n",
        "    most = MAX_PLAN_ITEMS\n",
    ),
    Mutant(
        "forks that make a sequence shorter make room for others",
        "messages.py",
        "max(0, fork.token_count) for fork",
        "fork.token_count for fork",
    ),
    Mutant(
        "a prompt that is too long has the length of what was read",
        "messages.py",
        "max(num_tokens, reserved_tokens) if is_too_long",
        "reserved_tokens if is_too_long",
    ),
    Mutant(
        "a held loop is not noticed",
        "leases.py",
        "        return passed_s - TICK_S if passed_s > UNNOTICED_S else 0.0\n",
        "        return 0.0\n",
    ),
    Mutant(
        "a renewal that waits behind a held loop has no time to be read",
        "leases.py",
        "if not self.was_let_in and self.expires_at < now + LET_IN_S:",
        "if False:",
    ),
    Mutant(
        "a lease that nobody renews is let in whenever the loop was held",
        "leases.py",
        "self.expires_at, self.was_let_in = now + LET_IN_S, True",
        "self.expires_at, self.was_let_in = now + LET_IN_S, False",
    ),
    # what tenants may have
    Mutant(
        "tenants with a section have the default's",
        "shares.py",
        "self.tenants.get(tenant, self.default)",
        "self.default",
    ),
    Mutant(
        "a quota above the limit", "shares.py", "quota = min(blocks(self.quota), limit)", "quota = blocks(self.quota)"
    ),
    Mutant(
        "a floor above the quota",
        "shares.py",
        "BlockShare(min(blocks(self.floor), quota), quota,",
        "BlockShare(blocks(self.floor), quota,",
    ),
    Mutant(
        "parts of a pool are rounded",
        "shares.py",
        "int(num_blocks * self.value / 100)",
        "round(num_blocks * self.value / 100)",
    ),
    Mutant("more blocks than the pool has", "shares.py", "else amount, num_usable_blocks)", "else amount, 2**31)"),
    Mutant(
        "no limit is a limit of none",
        "shares.py",
        "                return num_usable_blocks\n",
        "                return 0\n",
    ),
    Mutant("floors of more than the pool", "shares.py", "    if floors > 100:\n", "    if False:\n"),
    Mutant("a floor for whoever comes", "shares.py", "    if default.floor != 0:\n", "    if False:\n"),
    Mutant(
        "only neighbours are compared",
        "shares.py",
        "from itertools import combinations\n",
        "from itertools import pairwise\n\ncombinations = lambda keys, _: pairwise(keys)\n",
    ),
    Mutant(
        "blocks are compared with percentages",
        "shares.py",
        "return isinstance(amount, int) and isinstance(other, int) and amount > other",
        "return getattr(amount, 'value', amount) > getattr(other, 'value', other)",
    ),
    Mutant(
        "true is a number of blocks",
        "shares.py",
        'match["number"]))\n    if isinstance(value, int) and not isinstance(value, bool) and',
        'match["number"]))\n    if isinstance(value, int) and',
    ),
    Mutant("unknown keys are passed over", "shares.py", "        if key not in known:\n", "        if False:\n"),
    Mutant(
        "any worker that is back has its epoch's books",
        "catalog.py",
        "if known is not None and known.ledger.epoch == registration.epoch:",
        "if known is not None:",
    ),
    Mutant(
        "an epoch that another cachemgr has ruled is taken for one's own",
        "catalog.py",
        "registration.attached_term in (0, *known.terms)",
        "registration.attached_term is not None",
    ),
    Mutant(
        "who goes on with an epoch has ruled it alone",
        "catalog.py",
        "registration.attached_term in (0, *known.terms)",
        "registration.attached_term in (0, self.term)",
    ),
    Mutant(
        "books that are behind the worker are taken",
        "catalog.py",
        "if not is_ours or known.lacks(registration) or",
        "if not is_ours or",
    ),
    Mutant(
        "a report that the books lack is passed over",
        "catalog.py",
        "if registration.acknowledged_report > self.acknowledged_report:",
        "if registration.acknowledged_report < 0:",
    ),
    Mutant(
        "a lease that the books lack is passed over",
        "catalog.py",
        "if self.ledger.tenant_of(lease_id) is None or self.ledger.holdings(lease_id).next_step < next_step:",
        "if self.ledger.tenant_of(lease_id) is not None and self.ledger.holdings(lease_id).next_step < next_step:",
    ),
    Mutant(
        "a step that the books lack is passed over",
        "catalog.py",
        "self.ledger.holdings(lease_id).next_step < next_step",
        "next_step < 1",
    ),
    Mutant(
        "recovered reports are entered again",
        "catalog.py",
        "        pool.acknowledged_report = ledger.last_report\n",
        "",
    ),
    Mutant(
        "a recovered lease that has ended is open",
        "ledger.py",
        "if is_ending else LeaseState.OPEN",
        "if not lease_id else LeaseState.OPEN",
    ),
    Mutant(
        "a stranger's history is ignored",
        "catalog.py",
        "        if registration.attached_term:\n            return NewEpoch(term)\n",
        "",
    ),
    Mutant(
        "an older cachemgr goes above a later one's term",
        "catalog.py",
        "if uptime_s < registration.highest_term_age_s and registration",
        "if registration",
    ),
    Mutant(
        "books are gone on with under a term that is not theirs",
        "catalog.py",
        "known.lacks(registration) or registration.highest_term > known.term:",
        "known.lacks(registration):",
    ),
    Mutant(
        "a term that a pool was offered is forgotten",
        "catalog.py",
        "            self._raised_terms[registration.pool] = term\n",
        "",
    ),
    # what is told of blocks, to whom, and why a prefix misses
    Mutant(
        "a change that was overwritten is no gap",
        "cache/journal.rs",
        "if num_new > self.ring.len() as u64 {",
        "if num_new > self.ring.len() as u64 + 1 {",
    ),
    Mutant(
        "the oldest change that is kept is a gap",
        "cache/journal.rs",
        "if num_new > self.ring.len() as u64 {",
        "if num_new >= self.ring.len() as u64 {",
    ),
    Mutant("old content is told as new", "cache/journal.rs", "self.content_at[block as usize] > first", "true"),
    Mutant(
        "new content is told when its own entry is read",
        "cache/journal.rs",
        "        self.content_at[block as usize] = self.num_changes;\n",
        "        self.content_at[block as usize] = 0;\n",
    ),
    Mutant(
        "what is over the page is left out",
        "cache/journal.rs",
        "changes.len() == most => return Some((changes, number)),",
        "changes.len() == most => return Some((changes, end)),",
    ),
    Mutant(
        "a tenant is not told what it lost",
        "cache/journal.rs",
        "was_own |= tenant == Some(owner);",
        "was_own |= false;",
    ),
    Mutant(
        "blocks handed out are not told",
        "cache/pool.rs",
        "        self.journal.touch_all(&blocks[..num_popped], &self.owners);\n",
        "",
    ),
    Mutant(
        "blocks released are not told",
        "cache/pool.rs",
        "self.let_go(*block))?;\n        self.journal.touch_all(blocks, &self.owners);\n",
        "self.let_go(*block))?;\n",
    ),
    Mutant(
        "blocks acquired are not told",
        "cache/pool.rs",
        "        self.journal.touch_all(blocks, &self.owners);\n        Ok(())\n    }\n\n"
        "    /// One reference less to each. Give",
        "        Ok(())\n    }\n\n    /// One reference less to each. Give",
    ),
    Mutant(
        "blocks published are not told", "cache/pool.rs", "        if standing == block {\n", "        if false {\n"
    ),
    Mutant(
        "what is in an evicted block is still known",
        "cache/pool.rs",
        "        self.contents.forget(block);\n        self.touch_content(block);\n        self.index",
        "        self.touch_content(block);\n        self.index",
    ),
    Mutant(
        "the first loss of a place stays",
        "cache/losses.rs",
        "        self.places[place] = Some(loss);\n",
        "        self.places[place].get_or_insert(loss);\n",
    ),
    Mutant("any loss on its place will do", "cache/losses.rs", ".filter(|loss| loss.hash == *hash)", ""),
    Mutant("what was reset counts as evicted", "cache/losses.rs", "loss.cause != Cause::Reset", "loss.at >= 0.0"),
    Mutant(
        "a root that was forgotten is known for ever",
        "cache/losses.rs",
        "            self.known.remove(&oldest.hash);\n",
        "            drop(oldest);\n",
    ),
    Mutant(
        "a tenant is told of everybody's blocks",
        "books/looking.rs",
        "            was_own.then(",
        "            true.then(",
    ),
    Mutant(
        "a tenant lists everybody's blocks",
        "books/looking.rs",
        "tenant.is_none_or(|tenant| self.pool.owner(*block) == Some(tenant))",
        "tenant.is_none_or(|tenant| self.pool.owner(*block).is_some() || tenant == NOBODY)",
    ),
    Mutant("a tenant that is not there lists the first one's", "books/looking.rs", "unwrap_or(NOBODY)", "unwrap_or(0)"),
    Mutant(
        "a short page is the last one",
        "books/looking.rs",
        "(end < num_blocks).then_some(end)",
        "(end < num_blocks && !listed.is_empty()).then_some(end)",
    ),
    Mutant("content is told to everybody", "books/looking.rs", "        if with_content\n", "        if true\n"),
    Mutant(
        "others' tenants are told to everybody",
        "books/explain.rs",
        "if !is_own && (!with_other_tenants || other_tenant.is_some()) {",
        "if !is_own && other_tenant.is_some() {",
    ),
    Mutant(
        "what is being computed is lost",
        "books/explain.rs",
        "if self.is_being_computed(&root, num_found, &missing) {",
        "if self.pool.losses().find(&missing).is_none() && self.is_being_computed(&root, num_found, &missing) {",
    ),
    Mutant(
        "the block that is missing counts as behind itself",
        "books/explain.rs",
        "hashes[num_found + 1..]",
        "hashes[..]",
    ),
    Mutant("looking under other roots does not end", "books/explain.rs", "*num_left = left;", "*num_left = left + 1;"),
    Mutant("every block is the second", "books/settle.rs", "                parent = *hash;\n", ""),
    Mutant(
        "the last block of a prompt counts as computed again",
        "books/planner.rs",
        "&hashes[found.len()..self.num_sharable(tokens.len())]",
        "&hashes[found.len()..]",
    ),
    Mutant(
        "nobody's roots are known",
        "books/planner.rs",
        "        self.pool.enter_root(",
        "        let _ = |pool: &mut BlockPool| pool.enter_root(",
    ),
    Mutant(
        "a sequence is admitted without its salt",
        "books/planner.rs",
        "        sequence.salt = admission.salt.clone();\n",
        "",
    ),
    Mutant("a lease is not where its key is", "leases.py", "range(bisect.bisect_left(", "range(bisect.bisect_right("),
    Mutant(
        "the next lease goes out of the order",
        "leases.py",
        "        del self._keys[bisect.bisect_left(self._keys, key)]\n",
        "        del self._keys[bisect.bisect_right(self._keys, key) % len(self._keys)]\n",
    ),
    Mutant("a fenced lease stays in the list", "ledger.py", "            self._lease_order.remove(lease_id)\n", ""),
    Mutant("nobody is told of a change", "ledger.py", "        for tell in self._listeners:\n            tell()\n", ""),
    Mutant(
        "one lease is listed on every page",
        "ledger.py",
        "elif only in self._leases and page_key(only) >= key:",
        "elif only in self._leases:",
    ),
    Mutant("a page begins with the last one's end", "catalog.py", "if each > key)", "if each >= key)"),
    Mutant(
        "nobody is told of a new epoch",
        "catalog.py",
        "        for tell in self.listeners(registration.pool):\n            tell()\n",
        "",
    ),
    Mutant(
        "a cursor of another epoch is good",
        "watch.py",
        "if place is None or place.epoch != ledger.epoch:",
        "if place is None:",
    ),
    Mutant(
        "a gap is passed over",
        "watch.py",
        "            raise cursor_expired(self._ledger)\n",
        "            return None\n",
    ),
    Mutant(
        "a watch waits for a call when a pin ends",
        "watch.py",
        "asyncio.timeout(None if next_end is None else",
        "asyncio.timeout(None if True else",
    ),
    Mutant("a call reads what has ended", "inspection.py", "        pool.ledger.advance(self._clock())\n", ""),
    Mutant("a watch never ends", "watch.py", "        listeners.discard(changed.set)\n", "        pass\n"),
    Mutant("content is kept for ever", "watch.py", "        ledger.end_reading()\n", "        pass\n"),
    Mutant("a watch looks all the time", "watch.py", "        changed.clear()\n", "        pass\n"),
    Mutant(
        "each change is told by itself",
        "watch.py",
        "        await asyncio.sleep(self._looked_at + INTERVAL_S - asyncio.get_running_loop().time())\n",
        "",
    ),
    Mutant(
        "a snapshot does not say that it is one", "watch.py", "epoch=ledger.epoch, cleared=True)", "epoch=ledger.epoch)"
    ),
    Mutant(
        "who sees nothing keeps its place until it is gone",
        "watch.py",
        "if not events and self._number - self._told_number < self._ledger.num_changes_kept() // 4:",
        "if not events:",
    ),
    # -- what is kept, and for whom
    Mutant(
        "a pin is not told",
        "cache/pool.rs",
        "        self.journal.touch_all(blocks, &self.owners);\n        for &block in blocks {\n"
        "            let owner = self.owners[block as usize];\n            if self.is_idle(block) && ",
        "        for &block in blocks {\n            let owner = self.owners[block as usize];\n"
        "            if self.is_idle(block) && ",
    ),
    Mutant(
        "advice is not told",
        "cache/pool.rs",
        "            self.journal.touch_all(blocks, &self.owners);\n        }\n",
        "        }\n",
    ),
    Mutant("the end of advice is not told", "cache/pool.rs", "        self.journal.touch_all(&ended, owners);\n", ""),
    Mutant(
        "a wrong account is not told",
        "cache/pool.rs",
        "            if entered != counted {\n",
        "            if false {\n",
    ),
    Mutant(
        "a floor is kept from nobody",
        "cache/accounts.rs",
        "self.num_reserved.max(self.share.floor.saturating_sub(self.num_held))",
        "self.num_reserved",
    ),
    Mutant(
        "a reservation comes on top of the floor",
        "cache/accounts.rs",
        "self.num_reserved.max(self.share.floor.saturating_sub(self.num_held))",
        "self.num_reserved + self.share.floor.saturating_sub(self.num_held)",
    ),
    Mutant(
        "a floor is kept from its own tenant",
        "cache/accounts.rs",
        "let num_unclaimed = account.num_promised() - account.num_reserved;",
        "let num_unclaimed = 0;",
    ),
    Mutant(
        "others' floors do not limit what a tenant can ever hold",
        "cache/accounts.rs",
        "self.num_usable.saturating_sub(self.num_floors - share.floor)",
        "self.num_usable",
    ),
    Mutant("over the quota others' cached blocks go first", "cache/accounts.rs", "(!is_asker, ", "(is_asker, "),
    Mutant(
        "who is over the quota gives all its cached blocks first",
        "cache/accounts.rs",
        "num_over.num_over_quota().min(account.num_cached)",
        "if num_over.num_over_quota() > 0 { account.num_cached } else { 0 }",
    ),
    Mutant(
        "what is asked for does not count for the quota",
        "cache/accounts.rs",
        "if is_asker { count } else { 0 }",
        "if is_asker { 0 } else { 0 }",
    ),
    Mutant(
        "a share that is changed changes no promise",
        "cache/accounts.rs",
        "self.change(tenant, |account| account.share = share);",
        "self.accounts[tenant as usize].share = share;",
    ),
    Mutant("advice does not end", "cache/advice.rs", "if end > now {", "if end <= now || end > now {"),
    Mutant(
        "advice ends when other advice would have",
        "cache/advice.rs",
        "if self.until[block as usize] == end {",
        "if end <= now {",
    ),
    Mutant(
        "advice is kept though the content is gone", "cache/parking.rs", "shelves.book.forget(*block)", "drop(block)"
    ),
    Mutant(
        "what is worth more goes first",
        "cache/parking.rs",
        "self.evict_from_shelves(LEAST_WORTH..=UNADVISED - 1, end, victims);",
        "self.evict_from_shelves(LEAST_WORTH..=MOST_WORTH, end, victims);",
    ),
    Mutant(
        "what the policy gave up is still among its tenant's",
        "cache/parking.rs",
        "            victims[unadvised..].iter().for_each(|block| tenants.rings.remove(*block));\n",
        "",
    ),
    Mutant(
        "a tenant gives up what it parked first, whatever it is worth",
        "cache/parking.rs",
        "                tenants.park(*block, owner, level);\n            }\n        }\n    }\n\n    /// In use again",
        "                tenants.park(*block, owner, level.min(UNADVISED));\n"
        "            }\n        }\n    }\n\n    /// In use again",
    ),
    Mutant(
        "anybody takes back anybody's pin",
        "books/pinning.rs",
        "|pin: &&Pin| tenant.is_none_or(",
        "|pin: &&Pin| pin.id == *id || tenant.is_none_or(",
    ),
    Mutant(
        "pins do not end",
        "books/pins.rs",
        ".filter(|(end, _)| *end <= millis(now))",
        ".filter(|(end, _)| *end > millis(f64::MAX) && *end <= millis(now))",
    ),
    Mutant("the budget is for each pin", "books/pinning.rs", "account.num_pinned + needed > limit", "needed > limit"),
    Mutant(
        "what is promised is pinned",
        "books/pinning.rs",
        "(num_taken > available).then(",
        "(num_taken > available && limit == 0).then(",
    ),
    Mutant(
        "a prefix that is pinned again has two pins",
        "books/pinning.rs",
        "if known.is_none() {",
        "if known.is_none() || known.is_some() {",
    ),
    Mutant("a reset leaves the pins", "books/mod.rs", "            self.drop_pins()?;\n", ""),
    Mutant(
        "a pinned block is evicted",
        "cache/pool.rs",
        "            if self.is_idle(block) && !self.is_kept(block) {\n"
        "                self.parking.unpark(&[block]);\n",
        "            if self.is_idle(block) && !self.is_kept(block) {\n",
    ),
    Mutant(
        "a pinned block that is released is parked",
        "cache/pool.rs",
        "            idle.retain(|block| !self.is_kept(*block));\n",
        "",
    ),
    Mutant(
        "a block that a step may still publish is counted on",
        "books/room.rs",
        "!self.pool.is_writable(block) || self.pool.pin_count(block) > 0",
        "!self.pool.is_writable(block)",
    ),
    Mutant(
        "a duplicate takes what is promised",
        "books/settle.rs",
        "if self.pool.num_parked(&[standing]) > self.pool.num_spare() {",
        "if self.pool.num_parked(&[standing]) > self.pool.num_spare() + 1 {",
    ),
    Mutant(
        "a fork takes what its parent was promised",
        "books/planner.rs",
        "\n                    .or_else(|| self.refuse_unguaranteed(row, fork.num_tokens as usize))",
        "",
    ),
    Mutant(
        "what is shared before it is computed is not guaranteed",
        "books/planner.rs",
        "            num_guaranteed += found.len() - num_published;\n",
        "",
    ),
    Mutant(
        "a found block is counted on though the one before it is being filled",
        "books/planner.rs",
        "num_guaranteed += found.len() - num_published;",
        "num_guaranteed += usize::from(found.len() > num_published);",
    ),
    Mutant(
        "a reservation is rounded up to whole blocks",
        "books/geometry.rs",
        "if reserved > 0 { reserved.min(self.max_tokens()) } else { self.max_tokens() };",
        "self.max_tokens();",
    ),
    Mutant(
        "a restore goes beyond the reservation",
        "books/planner.rs",
        "            sequence.reserved_tokens\n        ));\n",
        "            0\n        ));\n",
    ),
    Mutant(
        "who shares what is not computed takes from its owner's guarantee",
        "books/planner.rs",
        "        if found.len() == num_published {\n            return num_guaranteed;\n",
        "        if found.len() >= num_published {\n            return num_guaranteed;\n",
    ),
    Mutant(
        "a trim takes what others were promised",
        "books/planner.rs",
        "            refuse_if!(self.room().refuse(trim.seq_id, needed, 0, 0));\n",
        "            let _ = needed;\n",
    ),
    Mutant(
        "a guaranteed sequence that is trimmed loses its blocks",
        "books/planner.rs",
        "if has_reservation { sequence.block_table.len() }",
        "if has_reservation && num_tokens == 0 { sequence.block_table.len() }",
    ),
    Mutant(
        "what is reserved is refused to its owner",
        "books/planner.rs",
        "let num_unreserved = num_fresh.saturating_sub(sequence.num_reserved);",
        "let num_unreserved = num_fresh;",
    ),
    Mutant(
        "what is reserved stays when the sequence ends",
        "books/planner.rs",
        "            self.pool.reserve(self.asker.tenant, std::mem::take(&mut sequence.num_reserved), 0);\n",
        "",
    ),
    Mutant(
        "what is reserved stays when the lease ends",
        "books/mod.rs",
        "            self.pool.reserve(holdings.tenant, sequence.num_reserved, 0);\n",
        "",
    ),
    Mutant(
        "found blocks that nobody holds do not count against the limit",
        "books/room.rs",
        "held + num_parked + needed > limit",
        "held + needed > limit",
    ),
    Mutant(
        "a head is worth less than its tail",
        "books/planner.rs",
        "least = if own.level >= least.level { own } else { least };",
        "least = own;",
    ),
    Mutant("nothing is said of what comes later", "books/planner.rs", "                tail = Some(least);\n", ""),
    Mutant(
        "what others hold is not expected either",
        "books/planner.rs",
        "self.is_kept_on(*block) && ref_count == 0 && level == UNADVISED",
        "self.is_kept_on(*block) && level == UNADVISED && ref_count < 99",
    ),
    Mutant(
        "what is expected back is worth less than was said",
        "books/planner.rs",
        "self.is_kept_on(*block) && self.pool.level(*block) < level",
        "self.is_kept_on(*block) && self.pool.level(*block) > 0",
    ),
    Mutant(
        "who came back counts as new", "books/counters.rs", "= if is_resumed {", "= if is_resumed && num_tokens == 0 {"
    ),
    # -- the host tier
    Mutant(
        "host blocks of a released sequence are free at once",
        "books/planner.rs",
        "                self.host.retire(&blocks)?;\n                last.pinned_in_host.push(blocks);\n"
        "                Ok(())\n",
        "                self.host.release(&blocks)\n",
    ),
    Mutant(
        "host blocks that are copied from are free at once",
        "books/planner.rs",
        "        self.host.retire(&host_blocks)?;\n        self.step.pinned_in_host.push(host_blocks);\n"
        "        Ok(())\n",
        "        self.host.release(&host_blocks)\n",
    ),
    Mutant(
        "blocks that are copied to the host tier are let go as those of a release",
        "books/planner.rs",
        "        self.pool.retire(&blocks)?;\n        self.step.pinned.push(blocks);\n        Ok(Ok(()))",
        "        self.let_go(blocks)?;\n        Ok(Ok(()))",
    ),
    Mutant(
        "only what is reported is copied to the host tier",
        "books/planner.rs",
        "self.geometry.num_blocks_for(sequence.num_scheduled).max(1)",
        "self.geometry.num_blocks_for(sequence.num_computed).max(1)",
    ),
    Mutant(
        "what nobody computed takes no host block",
        "books/planner.rs",
        "self.geometry.num_blocks_for(sequence.num_scheduled).max(1)",
        "self.geometry.num_blocks_for(sequence.num_scheduled)",
    ),
    Mutant(
        "steps in flight do not count for who was offloaded",
        "books/planner.rs",
        "            step.hand_over(row, heir, num_tokens);\n",
        "            step.join(row, heir, num_tokens);\n",
    ),
    Mutant(
        "an offloaded sequence's row counts as the worker's",
        "books/sequences.rs",
        "        self.num_offloaded += usize::from(sequence.is_offloaded());\n",
        "",
    ),
    Mutant(
        "the host tier hands out a block more than it has",
        "cache/host.rs",
        "if needed <= free {",
        "if needed <= free + 1 {",
    ),
    Mutant(
        "the host tier keeps its last block",
        "cache/host.rs",
        "if needed <= free {",
        "if needed < free {",
    ),
    Mutant(
        "a restored sequence copies what it shares",
        "books/planner.rs",
        "&host_blocks[num_found.min(num_valid)..num_valid]",
        "&host_blocks[..num_valid - num_found.min(num_valid)]",
    ),
    Mutant(
        "a restored sequence counts what it shares as its own to publish",
        "books/sequences.rs",
        "        self.num_published = num_found;\n",
        "        self.num_published = 0;\n",
    ),
    Mutant(
        "a sequence with a token on its way is restored",
        "books/planner.rs",
        "} else if sequence.num_promised() > 0 {",
        "} else if false {",
    ),
    Mutant(
        "an offloaded sequence can be trimmed, forked and extended",
        "books/planner.rs",
        "        if !self.table.get(row).is_offloaded() {\n            return Ok(row);",
        "        if !self.table.get(row).released {\n            return Ok(row);",
    ),
    Mutant(
        "a restore takes what admissions are to leave",
        "books/planner.rs",
        "self.pool.num_parked(&found), reserve));",
        "self.pool.num_parked(&found), 0));",
    ),
    Mutant(
        "a lease that ends keeps its host blocks",
        "books/mod.rs",
        "            self.host.release(&sequence.host_blocks.unwrap_or_default())?;\n",
        "",
    ),
    Mutant(
        "a step that has ended still pins host blocks",
        "books/mod.rs",
        "        step.pinned_in_host.iter().try_for_each(|blocks| self.host.unpin(blocks))?;\n",
        "",
    ),
    Mutant(
        "a trim is forgotten by who came back",
        "books/steps.rs",
        "            heir.end = heir.end.min(num_tokens);\n",
        "            heir.end = heir.end.max(0);\n",
    ),
    Mutant(
        "a wrong host tier is not told",
        "books/audit.rs",
        "        self.host.audit(&holders, &steps, wrong);\n",
        "        drop((holders, steps));\n",
    ),
]


class Workshop:
    """A job's copy of the crate, and where it is built."""

    def __init__(self, folder: Path) -> None:
        self.crate = folder / "core"
        self.target = folder / "target"
        shutil.copytree(CRATE, self.crate, ignore=shutil.ignore_patterns("target"))
        shutil.copytree(cargo_target() / "mutant", self.target / "mutant")
        self._seeded: Path | None = None

    def seed(self, mutant: Mutant) -> None:
        """Puts the bug into the crate in place of the last one."""
        if self._seeded is not None:
            (self.crate / self._seeded.relative_to(CRATE)).write_text(self._seeded.read_text())
        mutant.seed(self.crate)
        self._seeded = PACKAGE / mutant.path

    def library(self) -> Path:
        """The core, built. Raises RuntimeError if it does not compile."""
        self._cargo("build", *CARGO)
        return self.target / "mutant" / "lib_core.so"

    def is_noticed(self) -> bool:
        """Whether one of the crate's own tests fails. Raises RuntimeError if they do not compile."""
        self._cargo("test", *TEST_CARGO, "--no-run")
        try:
            done = self._run("test", *TEST_CARGO, timeout_s=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0

    def _cargo(self, *arguments: str) -> None:
        done = self._run(*arguments, timeout_s=BUILD_TIMEOUT_S)
        if done.returncode != 0:
            raise RuntimeError(f"it does not compile:\n{done.stderr[-4000:]}")

    def _run(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "CARGO_TARGET_DIR": str(self.target)}
        return run_all("cargo", *arguments, folder=self.crate, environment=environment, timeout_s=timeout_s)


def run_all(
    *command: str, folder: Path, environment: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs a command; after a timeout what it has started is ended, too. Raises subprocess.TimeoutExpired."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def cargo_target() -> Path:
    return Path(os.environ.get("CARGO_TARGET_DIR", CRATE / "target"))


def build_dependencies(*, for_tests: bool) -> None:
    """What all copies of the crate start from. Cost: half a minute of two cores, once."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(cargo_target())}
    commands = [("build", *CARGO), ("test", *TEST_CARGO, "--no-run")]
    for command in commands if for_tests else commands[:1]:
        subprocess.run(["cargo", "--quiet", *command], cwd=CRATE, env=environment, check=True)


@lru_cache(maxsize=1)
def workshop_in(folder: Path) -> Workshop:
    """The one of this process."""
    return Workshop(folder / str(os.getpid()))


def is_noticed(folder: Path, files: list[str]) -> bool:
    """Whether a test fails with the package in `folder`, or never ends, or takes its process down."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            code = NOT_RUN
            try:
                os.dup2(output.fileno(), sys.stdout.fileno())
                os.dup2(output.fileno(), sys.stderr.fileno())
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
                signal.alarm(TIMEOUT_S)
                code = stand_in(folder, [str(TESTS / "unit" / file) for file in files])
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code > 1:
            output.seek(0)
            raise RuntimeError(f"the tests did not run: {code}\n{output.read().decode()[-4000:]}")
    return code != 0


def killer_of(mutant: Mutant, suites: list[str], scratch: Path) -> str | None:
    """The first suite that notices the bug; None if none does."""
    with tempfile.TemporaryDirectory(dir=scratch) as copy:
        folder = Path(copy) / "cachemgr"
        shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("core", f"{mutant.path.stem}.*.pyc"))
        if mutant.is_rust:
            workshop_in(scratch).seed(mutant)
            shutil.copyfile(workshop_in(scratch).library(), folder / LIBRARY)
        else:
            mutant.seed(folder)
        notices = {
            "examples": lambda: is_noticed(folder, mutant.examples),
            "crate": lambda: mutant.is_rust and workshop_in(scratch).is_noticed(),
            "machine": lambda: is_noticed(folder, MACHINE),
        }
        return next((suite for suite in suites if notices[suite]()), None)


def stand_in(folder: Path, arguments: list[str]) -> int:
    """Runs pytest in this process with the package in `folder` as quire.cachemgr. Returns its exit code."""

    class StandIn:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            if name == "quire.cachemgr":
                where = [str(folder)]
                return importlib.util.spec_from_file_location(
                    name, folder / "__init__.py", submodule_search_locations=where
                )
            if name == "quire.cachemgr._core":
                return importlib.util.spec_from_file_location(name, folder / LIBRARY)
            if name.startswith("quire.cachemgr."):
                return importlib.util.spec_from_file_location(name, folder / f"{name.split('.')[-1]}.py")
            return None

    sys.meta_path.insert(0, StandIn)
    import quire.cachemgr._core as core
    import quire.cachemgr.ledger as ledger

    assert {Path(module.__file__).parent for module in (core, ledger)} == {folder}
    code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", *arguments]))
    sys.stdout.flush()
    return code


def judge(mutant: Mutant, *, suites: list[str], scratch: Path) -> tuple[Mutant, str | None, float]:
    """The bug, who notices it (ERROR if it is none that can be judged), and how long that took."""
    start = time.monotonic()
    try:
        killer = killer_of(mutant, suites, scratch)
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"{mutant.name}: {error}", file=sys.stderr, flush=True)
        killer = ERROR
    return mutant, killer, time.monotonic() - start


def chosen(options: argparse.Namespace) -> list[Mutant]:
    mutants = MUTANTS
    if options.sample:
        mutants = [mutant for mutant in mutants if not mutant.is_rust or mutant.name in SAMPLE]
    return [mutant for mutant in mutants if not options.words or any(word in mutant.name for word in options.words)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bugs with one of these in their names")
    parser.add_argument(
        "--suite", choices=SUITES, action="append", help="only these tests; default: all, in this order"
    )
    parser.add_argument("--sample", action="store_true", help="leave out most of the bugs in Rust")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    suites = [suite for suite in SUITES if suite in (options.suite or SUITES)]
    mutants = chosen(options)
    no_bugs = (NO_BUG, NO_SHELL_BUG, NO_RUST_BUG)
    sound = [no_bug for no_bug in no_bugs if any(mutant.examples == no_bug.examples for mutant in mutants)]

    os.environ |= ENVIRONMENT
    if NO_RUST_BUG in sound:
        build_dependencies(for_tests="crate" in suites)
    num_survivors = 0
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as scratch, context.Pool(options.jobs) as pool:
        judged = pool.imap(partial(judge, suites=suites, scratch=Path(scratch)), [*sound, *mutants])
        for mutant, killer, seconds in judged:
            if mutant in sound:
                if killer is not None:
                    raise SystemExit(f"{mutant.name}, and the tests fail: {killer}")
                continue
            num_survivors += killer in (None, ERROR)
            print(f"{killer or 'SURVIVED':9} {seconds:5.1f} s  {mutant.file:12} {mutant.name}", flush=True)
    print(f"{len(mutants)} bugs, {num_survivors} survived")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
