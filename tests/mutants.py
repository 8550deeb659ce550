"""Seeded bugs: each is one change of text in a copy of cachemgr/, and each has to be noticed by the tests.

    python tests/mutants.py                  all of them
    python tests/mutants.py fork "no pin"    those with such words in their names
    python tests/mutants.py --suite machine  by the state machine alone

The tree is never changed: a copy of the package with the bug stands in for quire.cachemgr in a process of its own,
forked from one that has imported whatever takes long and is none of ours.
Exits with 1 if a bug survives, or if the text it changes is not there exactly once.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import hypothesis.stateful  # noqa: F401 - once, for all processes
import numpy  # noqa: F401
import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "cachemgr"
SUITES = {
    "examples": [
        "test_ledger.py",
        "test_pool.py",
        "test_prefix.py",
        "test_sequences.py",
        "test_leases.py",
        "test_eviction.py",
        "test_catalog.py",
    ],
    "machine": ["test_ledger_machine.py"],
}
ENVIRONMENT = {
    "QUIRE_MACHINE_EXAMPLES": "700",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
TIMEOUT_S = 300
NOT_RUN = 70


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str


NO_BUG = Mutant("no bug", "pool.py", '"""The block pool:', '"""The block pool:')

FORKS = """        for fork in request.forks:
            self._fork(fork)
"""
EXTENDS = """        if len(request.extend_ids):
            self._extend_all(request)
"""
FINISHED = """        for step in lease.in_flight:
            self._finish(step)
"""
RELEASED = """        for sequence in lease.sequences.values():
            sequence.released = True
            self._blocks.release(sequence.blocks_tail_first())
"""

MUTANTS = [
    # who may be handed out, and when
    Mutant(
        "no pin: released blocks are free at once",
        "planner.py",
        "        if self._lease.in_flight:\n            self._lease.in_flight[-1].pinned",
        "        if False:\n            self._lease.in_flight[-1].pinned",
    ),
    Mutant(
        "no pin for the source of a copy",
        "planner.py",
        "        self._step.pinned.append(np.array([source]))\n        self._pool.retire_one(source)\n",
        "        self._pool.release(np.array([source]))\n",
    ),
    Mutant(
        "no pin for a duplicate that steps in flight still use",
        "ledger.py",
        "        if lease.in_flight:\n            lease.in_flight[-1].pinned",
        "        if False:\n            lease.in_flight[-1].pinned",
    ),
    Mutant(
        "pins of the first step in flight instead of the last",
        "planner.py",
        "self._lease.in_flight[-1].pinned.append(tail_first)",
        "self._lease.in_flight[0].pinned.append(tail_first)",
    ),
    Mutant(
        "pins ignored by a release",
        "pool.py",
        "self._rest(resting[pins == 0] if np.count_nonzero(pins) else resting)",
        "self._rest(resting)",
    ),
    Mutant(
        "references and other pins ignored by an unpin",
        "pool.py",
        "self._rest(block_ids[held == 0] if np.count_nonzero(held) else block_ids)",
        "self._rest(block_ids)",
    ),
    Mutant(
        "unpinned before published",
        "ledger.py",
        "        self._count(outcome)\n        if outcome",
        "        self._count(outcome)\n        self._finish(step)\n        step.pinned.clear()\n"
        "        step.released_rows.clear()\n        if outcome",
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
    Mutant("a fenced lease's pins are forgotten", "ledger.py", FINISHED + RELEASED, RELEASED),
    Mutant("what a fenced lease trimmed is kept longest", "ledger.py", FINISHED + RELEASED, RELEASED + FINISHED),
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
    Mutant("blocks found count as room", "planner.py", " - self._pool.num_parked(shared)", ""),
    Mutant("pinned blocks found count as parked", "pool.py", "self._refs[block_ids] + self._pins", "self._refs"),
    Mutant("reserve ignored", "planner.py", "if num_fresh + reserve > available:", "if num_fresh > available:"),
    Mutant(
        "released twice",
        "planner.py",
        "        sequence.released = True\n",
        "        sequence.released = True\n        self._let_go(sequence.blocks_tail_first()[-1:])\n",
    ),
    Mutant(
        "rows of released sequences are not counted",
        "planner.py",
        "        self._step.released_rows.append(sequence.row)\n",
        "        self._num_rows -= 1\n",
    ),
    Mutant(
        "rows of released sequences are another's at once",
        "planner.py",
        "        self._step.released_rows.append(sequence.row)\n",
        "        self._table.leave([sequence.row])\n        self._num_rows -= 1\n",
    ),
    Mutant(
        "rows of released sequences are never free again",
        "ledger.py",
        "        self._table.leave(step.released_rows)\n",
        "",
    ),
    Mutant(
        "a released block is not counted as active no more",
        "pool.py",
        "        self._num_active -= self._ref_count[block_id] == 0\n",
        "",
    ),
    Mutant("references below none", "pool.py", "        if refs.min() < 0:\n", "        if False:\n"),
    Mutant("pins below none", "pool.py", "if len(pins) and pins.min() < 0:", "if False:"),
    Mutant(
        "what has content is free, what has none is cached",
        "pool.py",
        "            self._push_free(block_ids[~is_findable])\n            block_ids = block_ids[is_findable]\n",
        "            self._push_free(block_ids[is_findable])\n            block_ids = block_ids[~is_findable]\n",
    ),
    Mutant(
        "free blocks are taken from the bottom and the top counted down",
        "pool.py",
        "self._free[top : self._num_free][::-1]",
        "self._free[:num_popped][::-1]",
    ),
    Mutant("a table's free blocks come highest first", "pool.py", "self._num_free][::-1]", "self._num_free]"),
    Mutant(
        "cached blocks that are acquired stay parked",
        "pool.py",
        "        self._policy.unpark(block_ids[pins == 0] if np.count_nonzero(pins) else block_ids)\n",
        "",
    ),
    Mutant(
        "retired blocks that are acquired are taken out of the parked ones",
        "pool.py",
        "        self._policy.unpark(block_ids[pins == 0] if np.count_nonzero(pins) else block_ids)\n",
        "        self._policy.unpark(block_ids)\n",
    ),
    Mutant("woken blocks are not active", "pool.py", "        self._num_active += len(block_ids)\n", ""),
    Mutant(
        "blocks without content are shared",
        "pool.py",
        '            raise BrokenInvariant(f"block {block_ids[is_findable.argmin()]} has no content to share")\n',
        "            pass\n",
    ),
    # who may write
    Mutant("copy-on-write dropped", "planner.py", "if not self._pool.is_writable(table[index])]", "if False]"),
    Mutant("copy-on-write without the copy", "planner.py", "is_copied=index * block_size < start", "is_copied=False"),
    Mutant(
        "shared blocks are written",
        "pool.py",
        "return self._ref_count[block_id] == 1 and self._index.hashes[block_id] is None",
        "return self._index.hashes[block_id] is None",
    ),
    Mutant(
        "published blocks are written",
        "pool.py",
        "return self._ref_count[block_id] == 1 and self._index.hashes[block_id] is None",
        "return self._ref_count[block_id] == 1",
    ),
    Mutant(
        "blocks that were published are written after a reset",
        "pool.py",
        "return self._ref_count[block_id] == 1 and self._index.hashes[block_id] is None",
        "return self._ref_count[block_id] == 1 and not self._index.hashes[block_id]",
    ),
    Mutant("a reset block has no past", "prefix.py", "        self.hashes[block_id] = DROPPED\n", ""),
    Mutant("a reset block's past is never over", "pool.py", "        self._index.forget_dropped(block_ids)\n", ""),
    Mutant("nobody knows that blocks were reset", "prefix.py", "        self._has_dropped = True\n", ""),
    Mutant(
        "fork without acquire",
        "planner.py",
        "            self._pool.acquire(np.array(children[0].block_table, np.int64), len(children))\n",
        "",
    ),
    Mutant("several forks acquire once", "planner.py", ", np.int64), len(children))", ", np.int64))"),
    Mutant("forks after extends", "planner.py", FORKS + EXTENDS, EXTENDS + FORKS),
    Mutant("a forked sequence still owns what it owned", "planner.py", "            parent.num_writable = 0\n", ""),
    Mutant("a failed sequence still owns what it owned", "sequences.py", "        self.num_writable = 0\n", ""),
    Mutant(
        "a sequence owns the blocks behind the one it got",
        "planner.py",
        "np.minimum(starts + self._geometry.block_size, self._geometry.max_tokens)",
        "np.minimum(starts + 2 * self._geometry.block_size, self._geometry.max_tokens)",
    ),
    Mutant(
        "longer than allowed in a block that a decode got",
        "planner.py",
        "np.minimum(starts + self._geometry.block_size, self._geometry.max_tokens)",
        "starts + self._geometry.block_size",
    ),
    Mutant(
        "longer than allowed in a block that was made writable",
        "planner.py",
        "min(num_blocks * block_size, self._geometry.max_tokens)",
        "num_blocks * block_size",
    ),
    Mutant(
        "longer than allowed in an admission's last block",
        "planner.py",
        "min(len(sequence.block_table) * self._geometry.block_size, self._geometry.max_tokens)",
        "len(sequence.block_table) * self._geometry.block_size",
    ),
    Mutant(
        "longer than allowed by a block more",
        "planner.py",
        " and starts.max() < self._geometry.max_tokens",
        "",
    ),
    Mutant(
        "a block more for whoever has one for its next token",
        "planner.py",
        "if not is_possible or firsts != list(map(len, block_tables)):",
        "if not is_possible:",
    ),
    Mutant(
        "blocks for all decodes whether there are as many or not",
        "planner.py",
        "is_possible = len(rows) <= self._pool.num_allocatable and ",
        "is_possible = ",
    ),
    Mutant(
        "a fork has no copy of the last token to compute",
        "sequences.py",
        "min(parent.num_scheduled, num_tokens - 1)",
        "min(parent.num_scheduled, num_tokens)",
    ),
    Mutant(
        "a fork does not get the token being sampled",
        "leases.py",
        "            self.also.setdefault(index_of, []).append(child)\n",
        "            pass\n",
    ),
    Mutant(
        "a fork's fork does not get the token being sampled",
        "leases.py",
        "                forks.append(child)\n",
        "                pass\n",
    ),
    Mutant(
        "a fork gets a token behind its end",
        "leases.py",
        "self.receives[index_of] and self.sampled_positions[index_of] < num_tokens:",
        "self.receives[index_of]:",
    ),
    Mutant(
        "a fork knows where a token behind its end was sampled",
        "sequences.py",
        "        if parent.sampled_position < num_tokens:\n",
        "        if True:\n",
    ),
    Mutant(
        "a fork's copy of a published block is kept",
        "sequences.py",
        "self.num_published = min(published, num_scheduled // size)",
        "self.num_published = min(published, num_full)",
    ),
    # what can be found
    Mutant(
        "published when planned",
        "planner.py",
        "            self._step.fills.append(Fill(sequence, first, num_full))\n",
        "            self._step.fills.append(Fill(sequence, first, num_full))\n"
        "            hashes = sequence.hash_up_to(num_full)[first - sequence.num_published :]\n"
        "            self._index.publish(hashes, sequence.block_table[first:num_full])\n",
    ),
    Mutant(
        "published though the step failed",
        "ledger.py",
        "        elif len(step.runs) and not step.is_doomed:\n            self._doom_in_flight(lease)",
        "        elif len(step.runs):\n"
        "            self._enter_computed(lease, step.runs, np.zeros(len(step.runs), np.int32))\n"
        "            self._doom_in_flight(lease)",
    ),
    Mutant(
        "a plan made after a failure still fails",
        "ledger.py",
        "            lease.known_step = step.step_number\n",
        "",
    ),
    Mutant(
        "a report of a doomed step takes back what is known",
        "ledger.py",
        "lease.known_step = max(lease.known_step, step_number)",
        "lease.known_step = step_number",
    ),
    Mutant(
        "a doomed step dooms again",
        "ledger.py",
        "        elif len(step.runs) and not step.is_doomed:",
        "        elif len(step.runs):",
    ),
    Mutant("a doomed step is taken as computed", "ledger.py", "if step.is_doomed and len(step.runs):", "if False:"),
    Mutant(
        "an evicted block can still be found",
        "pool.py",
        "        self._index.forget(block_ids)\n        self._num_evicted += count",
        "        self._num_evicted += count",
    ),
    Mutant("a forgotten block counts as findable", "prefix.py", "        self.findable[block_ids] = False\n", ""),
    Mutant(
        "a published block does not count as findable",
        "prefix.py",
        "        self.findable[np.array(standing)] = True\n",
        "",
    ),
    Mutant(
        "the block published last stands",
        "prefix.py",
        ".setdefault(prefix_hash, block_id)",
        ".__setitem__(prefix_hash, block_id) or block_id",
    ),
    Mutant("a hole in the prefix is skipped", "prefix.py", "                break\n", "                continue\n"),
    Mutant("released head first", "sequences.py", "[first:][::-1]", "[first:]"),
    Mutant(
        "unpinned head first",
        "pool.py",
        "self._rest(block_ids[held == 0] if np.count_nonzero(held) else block_ids)",
        "self._rest((block_ids[held == 0] if np.count_nonzero(held) else block_ids)[::-1])",
    ),
    Mutant(
        "most recently used is evicted first",
        "eviction.py",
        "        self._num_parked -= count\n        return self._ring.take(NULL_BLOCK, count)\n",
        "        block_ids = list(self)[: -count - 1 : -1]\n        self.unpark(np.array(block_ids))\n"
        "        return block_ids\n",
    ),
    Mutant(
        "cached blocks go before free ones",
        "pool.py",
        "num_popped = min(count, self._num_free)",
        "num_popped = max(0, min(count, count - len(self._policy)))",
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
    Mutant("a lease's last root is every prompt's", "leases.py", "or self.last_root[0] != key:", "and False:"),
    Mutant("hashes not chained", "prefix.py", "sha256(parent + tokens[start", "sha256(tokens[start"),
    Mutant(
        "nothing left to compute of a cached prompt",
        "planner.py",
        "most = (num_tokens - 1) // self._geometry.block_size",
        "most = num_tokens // self._geometry.block_size",
    ),
    Mutant(
        "a lookup finds more than an admission",
        "ledger.py",
        "(len(tokens) // TOKEN_BYTES - 1) // size",
        "len(tokens) // TOKEN_BYTES // size",
    ),
    Mutant("what a failed step was to fill is shared", "ledger.py", "            step.fills.clear()\n", ""),
    Mutant(
        "what was trimmed is shared as filled",
        "leases.py",
        "        self._limit_fills(sequence, num_tokens // block_size)\n",
        "",
    ),
    Mutant(
        "what others write on is shared as filled", "leases.py", "        self._limit_fills(sequence, num_blocks)\n", ""
    ),
    Mutant(
        "what others write on counts as computed",
        "leases.py",
        "        self.runs.limit(sequence, num_blocks * block_size)\n",
        "",
    ),
    Mutant(
        "what is being filled is shared after its release",
        "planner.py",
        "if block_id is None or not (self._pool.ref_count(block_id) or self._index.hashes[block_id]):",
        "if block_id is None:",
    ),
    Mutant(
        "what is being filled goes before what was published",
        "planner.py",
        "self._index.lookup(prefix_hash) or filled.get(prefix_hash)",
        "filled.get(prefix_hash) or self._index.lookup(prefix_hash)",
    ),
    Mutant(
        "what is being filled counts as published",
        "planner.py",
        "return found, num_published\n\n    def",
        "return found, len(found)\n\n    def",
    ),
    Mutant("of what a step fills alike the last is shared", "leases.py", "reversed(self.fills)", "self.fills"),
    Mutant(
        "of what steps fill alike the last is shared",
        "planner.py",
        "(self._step, *reversed(self._lease.in_flight))",
        "(*self._lease.in_flight, self._step)",
    ),
    Mutant(
        "a released sequence publishes what others write on",
        "planner.py",
        "if self._pool.pin_count(table[index]) and index not in foreign:",
        "if False:",
    ),
    Mutant(
        "a duplicate is swapped and nobody is told",
        "ledger.py",
        "        lease.table_changes.append((sequence, index))\n",
        "",
    ),
    Mutant("duplicates are kept", "ledger.py", "if block_id != stands and not sequence.released:", "if False:"),
    Mutant(
        "a released sequence's duplicates are swapped",
        "ledger.py",
        "if block_id != stands and not sequence.released:",
        "if block_id != stands:",
    ),
    Mutant(
        "a duplicate is swapped without a reference",
        "ledger.py",
        "        self._blocks.acquire(np.array([standing]))\n",
        "",
    ),
    Mutant(
        "changed entries of released sequences are written",
        "planner.py",
        "if not sequence.released and index < len(sequence.block_table):",
        "if index < len(sequence.block_table):",
    ),
    Mutant("changed entries are written again", "planner.py", "        self._lease.table_changes.clear()\n", ""),
    Mutant("full blocks are published late", "ledger.py", "has_more = num_valid >= (", "has_more = num_valid > ("),
    Mutant("published again and again", "ledger.py", "        self._table.published[rows] = num_full\n", ""),
    Mutant(
        "the cache is reset but for the index",
        "pool.py",
        "                index.forget([block_id])\n                self._push_free",
        "                self._push_free",
    ),
    Mutant(
        "the cache is reset but for the policy",
        "pool.py",
        "                self._policy.unpark(np.array([block_id]))\n",
        "",
    ),
    # prefix hashes of a sequence
    Mutant(
        "hashes while decoding begin at the root",
        "sequences.py",
        "chain_hashes(self.last_hash, tokens",
        "chain_hashes(self.root, tokens",
    ),
    Mutant(
        "hashes go on from the published ones twice",
        "sequences.py",
        "parent = self.hashes[-1] if self.hashes else self.last_hash",
        "parent = self.last_hash",
    ),
    Mutant(
        "the last hash is one that is not published",
        "sequences.py",
        "self.last_hash = hashes[count - 1]",
        "self.last_hash = hashes[-1]",
    ),
    Mutant("taken hashes are kept", "sequences.py", "        self.hashes = hashes[count:]\n", ""),
    Mutant(
        "the hash of a reset block is none", "sequences.py", "        if known:\n", "        if known is not None:\n"
    ),
    Mutant(
        "a fork has hashes of tokens behind its end",
        "sequences.py",
        "self.hashes = parent.hashes[: num_full - published]",
        "self.hashes = parent.hashes[:]",
    ),
    Mutant(
        "hashes of trimmed tokens are kept",
        "sequences.py",
        "            del self.hashes[num_full - self.num_published :]\n",
        "            pass\n",
    ),
    Mutant("hashes of unpublished blocks are kept", "sequences.py", "            self.hashes.clear()\n", ""),
    Mutant(
        "what was found being filled counts as computed",
        "sequences.py",
        "self.num_computed = num_published * size",
        "self.num_computed = num_cached_blocks * size",
    ),
    # steps and tokens
    Mutant("of many sequences a full tail is kept too late", "sequences.py", "slots == size - 1", "slots == size"),
    Mutant(
        "of one sequence a full tail is kept too early",
        "sequences.py",
        "slot == self.table.block_size - 1",
        "slot == self.table.block_size - 2",
    ),
    Mutant(
        "trimmed tokens stay among the full ones",
        "sequences.py",
        "            del self.full_tokens[num_full * TOKEN_BYTES :]\n",
        "",
    ),
    Mutant(
        "tails are lost when the table grows",
        "sequences.py",
        "np.concatenate([self.tails, np.zeros((num_rows - old, self.block_size), np.int32)])",
        "np.zeros((num_rows, self.block_size), np.int32)",
    ),
    Mutant(
        "a row begins where its last sequence ended",
        "sequences.py",
        "            cells[row] = 0\n",
        "            pass\n",
    ),
    Mutant(
        "promised tokens kept after a failure",
        "sequences.py",
        "        self.num_tokens = self.num_known\n        self.num_writable",
        "        self.num_writable",
    ),
    Mutant(
        "scheduled tokens kept after a failure", "sequences.py", "        self.num_scheduled = self.num_computed\n", ""
    ),
    Mutant(
        "the sampled token kept after a failure",
        "sequences.py",
        "            self.sampled_position = NOWHERE\n",
        "            pass\n",
    ),
    Mutant(
        "the sampled token kept after a trim",
        "planner.py",
        "            sequence.sampled_position = NOWHERE\n",
        "            pass\n",
    ),
    Mutant(
        "what is trimmed is still sampled",
        "leases.py",
        "            self.receives[index_of] = False\n",
        "            pass\n",
    ),
    Mutant(
        "what is trimmed off a fork is still sampled",
        "leases.py",
        "                forks.remove(sequence)\n",
        "                pass\n",
    ),
    Mutant(
        "computed beyond a trim",
        "ledger.py",
        "np.maximum(table.computed[rows], runs.ends)",
        "np.maximum(table.computed[rows], runs.sampled_positions)",
    ),
    Mutant(
        "a failure of an empty step forgets what is in flight",
        "ledger.py",
        "        elif len(step.runs) and not step.is_doomed:\n",
        "        elif not step.is_doomed:\n",
    ),
    Mutant(
        "sampled tokens go to the first runs",
        "ledger.py",
        "tokens[is_received])",
        "tokens[: np.count_nonzero(is_received)])",
    ),
    Mutant(
        "sampled tokens are taken in the order of the runs",
        "ledger.py",
        "if sampled_ids.tobytes() == runs.seq_ids.tobytes():",
        "if len(sampled_ids) == len(runs.seq_ids):",
    ),
    Mutant("forks get the first run's token", "ledger.py", "tokens.item(index)", "tokens.item(0)"),
    Mutant(
        "a report may leave out a fork's token",
        "leases.py",
        "*(index for index, forks in self.also.items() if forks)",
        "",
    ),
    Mutant(
        "a report of other lengths is taken",
        "ledger.py",
        " or planned_counts.tobytes() != token_counts.tobytes():",
        ":",
    ),
    Mutant(
        "wrong tokens in an extend's digest",
        "planner.py",
        "token_bytes(starts.item(index), ends.item(index))",
        "token_bytes(0, ends.item(index))",
    ),
    Mutant("wrong tokens in an admission's digest", "planner.py", "token_bytes(start, end)", "token_bytes(0, end)"),
    Mutant(
        "another token than the sampled one is not given",
        "planner.py",
        "(table.sampled[rows] != starts) | (ends != starts + 1)",
        "ends != starts + 1",
    ),
    Mutant(
        "tokens behind the sampled one are not given",
        "planner.py",
        "(table.sampled[rows] != starts) | (ends != starts + 1)",
        "table.sampled[rows] != starts",
    ),
    Mutant(
        "what is appended to a decode is lost",
        "planner.py",
        "            is_decode &= [seq_id not in appends for seq_id in seq_ids.tolist()]\n",
        "            pass\n",
    ),
    Mutant(
        "a run that ends before its sequence samples",
        "planner.py",
        "samples = table.tokens[rows] == ends",
        "samples = table.tokens[rows] >= ends",
    ),
    Mutant("runs of admissions come first", "planner.py", "runs.followed_by(added)", "added.followed_by(runs)"),
    Mutant(
        "decodes go before what comes first",
        "planner.py",
        "        others = (~extends.is_ready).nonzero()[0]\n",
        "        others = (~extends.is_ready).nonzero()[0]\n"
        '        others = others[np.argsort(~extends.is_decode[others], kind="stable")]\n',
    ),
    Mutant("budget ignored", "planner.py", "            self._budget -= count\n", "            pass\n"),
    # who is in which row
    Mutant(
        "a sequence that left is found", "leases.py", "            self._rows[slot] = NOBODY\n", "            pass\n"
    ),
    Mutant(
        "a sequence is found in place of another",
        "leases.py",
        "            rows[is_other] = NOBODY\n",
        "            pass\n",
    ),
    Mutant(
        "a sequence whose slot another took is not found",
        "leases.py",
        "                rows[index] = sequence.row\n",
        "                pass\n",
    ),
    Mutant(
        "a map that grows forgets",
        "leases.py",
        "                self._rows[other.seq_id & self._mask] = other.row\n",
        "                pass\n",
    ),
    Mutant("a left row keeps its sequence's id", "sequences.py", "            self.seq_ids[row] = -1\n", ""),
    # eviction
    Mutant("parked blocks are linked one way", "eviction.py", "        self._all_prev[nodes[1:]] = nodes[:-1]\n", ""),
    Mutant(
        "blocks are taken out of the ring one by one too far",
        "eviction.py",
        "left, right = before[first], after[last]",
        "left, right = before[first], after[first]",
    ),
    Mutant(
        "the ring's head has an evicted block before it",
        "eviction.py",
        "        after[sentinel], self._prev[node] = node, sentinel\n        return taken\n\n    def take_alike",
        "        after[sentinel] = node\n        return taken\n\n    def take_alike",
    ),
    Mutant(
        "what is unparked is counted under LRU",
        "eviction.py",
        "            self._ring.remove(block_ids)\n            self._num_parked -= len(block_ids)\n",
        "            self._ring.remove(block_ids)\n",
    ),
    Mutant(
        "what is unparked is counted by the default",
        "eviction.py",
        "            self._rings.remove(block_ids)\n            self._num_parked -= len(block_ids)\n",
        "            self._rings.remove(block_ids)\n",
    ),
    Mutant(
        "a parent is kept shorter than its child",
        "eviction.py",
        "place = max(place, self._segments.place[segment], self._use(segment, event_class, num_uncounted))",
        "place = self._use(segment, event_class, num_uncounted)",
    ),
    Mutant(
        "blocks evicted by the default keep their segment",
        "eviction.py",
        "                self._segments_of[taken] = UNKNOWN\n",
        "",
    ),
    Mutant("free blocks keep their segment", "pool.py", "        self._policy.forget(block_ids)\n", ""),
    # calls
    Mutant("request_id ignored", "leases.py", "if not request_id or request_id not in self.answers:", "if True:"),
    Mutant(
        "a reused request_id gets the old answer",
        "leases.py",
        "        if known_digest != digest:\n",
        "        if False:\n",
    ),
    Mutant(
        "a digest without the parts' lengths",
        "plans.py",
        "sha256(repr([len(part) for part in parts]).encode())",
        "sha256()",
    ),
    Mutant(
        "a digest without the forks' children",
        "plans.py",
        "(fork.parent_id, list(fork.child_ids), fork.num_tokens)",
        "(fork.parent_id, fork.num_tokens)",
    ),
    Mutant(
        "a digest without what is appended", "plans.py", 'repr(self.appends).encode() if self.appends else b""', 'b""'
    ),
    Mutant(
        "a digest without limits of admissions",
        "plans.py",
        "repr((self.seq_id, self.max_compute))",
        "repr(self.seq_id)",
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
    Mutant("a lease that starts anew finds old rows", "leases.py", "        self.rows = RowMap()\n", ""),
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
    path = folder / mutant.file
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns(f"{path.stem}.*.pyc"))
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: its text is {source.count(mutant.old)} times in {mutant.file}")
    path.write_text(source.replace(mutant.old, mutant.new, 1))


def is_noticed(folder: Path, files: list[str]) -> bool:
    """Whether a test fails with the package in `folder`."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            code = NOT_RUN
            try:
                os.dup2(output.fileno(), sys.stdout.fileno())
                os.dup2(output.fileno(), sys.stderr.fileno())
                signal.alarm(TIMEOUT_S)
                code = stand_in(folder, [str(TESTS / "unit" / file) for file in files])
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, 1):
            output.seek(0)
            raise RuntimeError(f"the tests did not run: {code}\n{output.read().decode()[-4000:]}")
    return code == 1


def killer_of(mutant: Mutant, suites: dict[str, list[str]]) -> str | None:
    """The first suite that notices the bug; None if none does."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "cachemgr"
        mutate(mutant, folder)
        first = (f"test_{mutant.file}", "test_ledger.py")  # the most likely to notice it
        for name, files in suites.items():
            likely, others = [file for file in files if file in first], [file for file in files if file not in first]
            if any(is_noticed(folder, part) for part in (likely, others) if part):
                return name
        return None


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
            if name.startswith("quire.cachemgr."):
                return importlib.util.spec_from_file_location(name, folder / f"{name.split('.')[-1]}.py")
            return None

    sys.meta_path.insert(0, StandIn)
    import quire.cachemgr.ledger as ledger

    assert Path(ledger.__file__).parent == folder
    code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", *arguments]))
    sys.stdout.flush()
    return code


def judge(mutant: Mutant, *, suites: dict[str, list[str]]) -> tuple[Mutant, str | None, float]:
    """The bug, who notices it, and how long that took."""
    start = time.monotonic()
    return mutant, killer_of(mutant, suites), time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bugs with one of these in their names")
    parser.add_argument("--suite", choices=SUITES, help="only these tests; default: one after the other")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    suites = {name: files for name, files in SUITES.items() if options.suite in (None, name)}
    mutants = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]

    os.environ |= ENVIRONMENT
    num_survivors = 0
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for mutant, killer, seconds in pool.imap(partial(judge, suites=suites), [NO_BUG, *mutants]):
            if mutant == NO_BUG:
                if killer is not None:
                    raise SystemExit(f"the {killer} fail without a bug")
                continue
            num_survivors += killer is None
            print(f"{killer or 'SURVIVED':9} {seconds:5.1f} s  {mutant.file:12} {mutant.name}", flush=True)
    print(f"{len(mutants)} bugs, {num_survivors} survived")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
