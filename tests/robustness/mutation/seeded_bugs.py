"""The seeded bugs: mistakes in the protocol that the tests have to notice. `mutants.py` seeds them.

Each one breaks a rule of docs/protocol.md, or brings back a bug of the table in tests/README.md. Changes of a single
operator are not here: cargo-mutants and mutmut make them (`make mutants`).

A change names a function and a statement in it, not a file and not a line. The function is looked for in all files of
its package, and the statement is compared without white space. So a bug survives a move of its function to another
file and a new line break. It is an error if the statement of a change is not there exactly once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import syntax

CORE = "core"
"""The Rust crate; every other package is a Python package of the repository."""
GPU_IDEA = "a GPU"
"""The idea of bugs that show on a GPU only: `tests/gpu_desk` stands in for it."""
PROMISE_IDEA = "watch's promise"
"""The idea of bugs that break a word of docs/reference/watch.md."""
VERIFIED_IDEA = "verified drafts"
"""The idea of bugs of a worker that verifies drafts."""
HOLDER_IDEA = "a holder"
"""The idea of bugs of memory that a holder lends."""
QUANTIZED_IDEA = "quantized"
"""The idea of bugs of quantized weights, and of keys and values in float8."""
DISK_IDEA = "a disk"
"""The idea of bugs of copies on a disk."""
DISK = "disk"
"""The feature of simulated schedules that they need."""
ADAPTERS_IDEA = "adapters"
"""The idea of bugs of adapters: their owners, their slots, and the tenants that may use them."""
RANKS_IDEA = "ranks"
"""The idea of bugs of a worker with several ranks."""

SIMULATED_IDEAS = {"awaits", "wake-ups", "acknowledgements", "ABA", "failed steps", "moves", "memory"}
"""The ideas of bugs that show in the order of events: `tests/robustness/simulation` is to find them."""


class NotSeeded(Exception):
    """A change does not fit the present source."""


@dataclass(frozen=True, slots=True)
class Change:
    """In a function of this name, `old` becomes `new`. Both are statements or expressions."""

    function: str
    old: str
    new: str

    def places(self, sources: Mapping[Path, str]) -> set[tuple[Path, int, int]]:
        """Each place of `old`: file, begin and end. Exactly one is right."""
        pattern, found = pattern_of(self.old), set()
        for path, source in sources.items():
            for begin, end in functions_of(path, source, self.function):
                found |= {(path, *match.span()) for match in pattern.finditer(source, begin, end)}
        return found

    def applied(self, sources: Mapping[Path, str]) -> dict[Path, str]:
        """All sources with this change. Raises NotSeeded."""
        places = self.places(sources)
        if len(places) != 1:
            raise NotSeeded(f"function {self.function} has this statement {len(places)} times: {self.old}")
        ((path, begin, end),) = places
        source = sources[path]
        line = source[source.rfind("\n", 0, begin) + 1 :]
        indent = line[: len(line) - len(line.lstrip(" "))]
        new = self.new.replace("\n", "\n" + indent)
        return {**sources, path: source[:begin] + new + source[end:]}


@dataclass(frozen=True, slots=True)
class Bug:
    """One mistake: all of its changes together."""

    idea: str
    name: str
    package: str
    changes: tuple[Change, ...]

    def seed(self, folder: Path) -> None:
        """Changes the files of a copy of its package. Raises NotSeeded, with nothing changed."""
        before = read_sources(folder, self.package)
        sources = before
        for change in self.changes:
            sources = change.applied(sources)
        for path, source in sources.items():
            if source != before[path]:
                path.write_text(source)


def read_sources(folder: Path, package: str) -> dict[Path, str]:
    """The product's source files below a folder, by path. Those of Rust end before their own tests."""
    if package != CORE:
        return {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
    return {path: path.read_text() for path in sorted((folder / "src").rglob("*.rs")) if path.stem != "tests"}


def functions_of(path: Path, source: str, name: str) -> Iterator[tuple[int, int]]:
    """Begin and end of every function of this name."""
    if path.suffix == ".rs":
        product = source.split("\n#[cfg(test)]\n")[0]
        for match in re.finditer(rf"^( *)(?:pub(?:\([a-z]+\))? )?fn {name}\b", product, re.MULTILINE):
            yield match.start(), product.find(f"\n{match[1]}}}\n", match.end()) + 1 or len(product)
        return
    if f"def {name}" not in source:  # parsing takes long
        return
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node in ast.walk(syntax.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            yield lines[node.lineno - 1], lines[node.end_lineno or node.lineno]


def pattern_of(text: str) -> re.Pattern[str]:
    """Matches the text with any white space between its words and signs, and a comma before a closing bracket."""
    tokens = re.findall(r"\w+|\S", text)
    parts = [(",?" + r"\s*" if token in ")]}" else "") + re.escape(token) for token in tokens]
    return re.compile(r"(?<!\w)" + r"\s*".join(parts) if tokens[0].isidentifier() else r"\s*".join(parts))


def rust(idea: str, name: str, *changes: tuple[str, str, str]) -> Bug:
    return Bug(idea, name, CORE, tuple(Change(*change) for change in changes))


def manager(idea: str, name: str, *changes: tuple[str, str, str]) -> Bug:
    return Bug(idea, name, "cachemgr", tuple(Change(*change) for change in changes))


def worker(idea: str, name: str, *changes: tuple[str, str, str]) -> Bug:
    return Bug(idea, name, "worker", tuple(Change(*change) for change in changes))


def events(idea: str, name: str, *changes: tuple[str, str, str]) -> Bug:
    return Bug(idea, name, "integrations", tuple(Change(*change) for change in changes))


def client(idea: str, name: str, *changes: tuple[str, str, str]) -> Bug:
    return Bug(idea, name, "client", tuple(Change(*change) for change in changes))


def gateway(idea: str, name: str, *changes: tuple[str, str, str]) -> Bug:
    return Bug(idea, name, "gateway", tuple(Change(*change) for change in changes))


BUGS = [
    # -- retired blocks: what a planned step may still touch is not handed out
    rust(
        "retired blocks",
        "released blocks are free while steps in flight use them",
        (
            "let_go",
            "pool.retire(&tail_first)?; last.holds.push(tail_first); Ok(())",
            "let _ = last;\npool.release(&tail_first)",
        ),
    ),
    rust(
        "retired blocks",
        "blocks wait for the first step in flight, not for the last one",
        ("let_go", "self.in_flight.back_mut()", "self.in_flight.front_mut()"),
    ),
    rust(
        "retired blocks",
        "the source of a copy waits for the steps before the copy only",
        (
            "replace",
            "self.step.holds.push(vec![source]); self.pool.retire(&[source])",
            "self.lease.let_go(vec![source], self.pool)",
        ),
    ),
    rust(
        "retired blocks",
        "a step's blocks come back before what it computed is published",
        (
            "enter",
            'let mut step = self.lease.in_flight.pop_front().expect("it is the first one in flight");',
            'let mut step = self.lease.in_flight.pop_front().expect("it is the first one in flight");\n'
            "for blocks in std::mem::take(&mut step.holds) {\n    self.pool.end_holds(&blocks)?;\n}",
        ),
    ),
    rust(
        "retired blocks",
        "a released sequence's row is another one's at once",
        (
            "end",
            "self.step.released_rows.push(row); sequence.blocks_tail_first(0)",
            "let blocks = sequence.blocks_tail_first(0);\nself.table.leave(row);\nblocks",
        ),
    ),
    # -- reference counts
    rust(
        "reference counts",
        "a duplicate is replaced by a published block without a reference",
        ("swap", "self.pool.acquire(&[standing], 1)?;", ""),
    ),
    # -- forks and copy-on-write
    rust(
        "copy-on-write",
        "a shared block is replaced without a copy of what counts in it",
        (
            "make_table_writable",
            "self.replace(row, group, *index, target, index * block_size < start)?;",
            "self.replace(row, group, *index, target, false)?;",
        ),
    ),
    rust(
        "copy-on-write",
        "a published block is written",
        (
            "is_writable",
            "self.holders.ref_count(block) == 1 && self.index.past(block) == Past::None",
            "self.holders.ref_count(block) == 1",
        ),
    ),
    rust(
        "copy-on-write",
        "extends come before forks: a parent writes on what its fork shares",
        (
            "run",
            "for fork in &request.forks { self.fork(fork)?; } self.extend_all(&request.extends)?;",
            "self.extend_all(&request.extends)?;\nfor fork in &request.forks {\n    self.fork(fork)?;\n}",
        ),
    ),
    rust(
        "copy-on-write",
        "a released sequence's step publishes a block that a fork writes on",
        (
            "make_table_writable",
            "forget_claims(block, self.lease, &mut self.step, self.table, self.geometry.block_size);",
            "let _ = forget_claims;",
        ),
    ),
    rust(
        "copy-on-write",
        "a fork does not get the token that its parent is sampling",
        ("join", "self.also.entry(index).or_default().push(child);", "let _ = index;"),
    ),
    # -- published prefixes
    rust(
        "published prefixes",
        "a block can be found as soon as it is planned",
        (
            "enter_run",
            "self.step.expect_fill(",
            "let num_full = end.min(self.table.get(row).num_known()) / self.geometry.block_size;\n"
            "let (first, sequence) = (self.table.get(row).num_published, self.table.get_mut(row));\n"
            "if num_full > first {\n"
            "    for (index, hash) in (first..).zip(sequence.take_hashes(num_full, self.geometry.block_size)) {\n"
            "        self.pool.publish(&hash, sequence.table(0).block(index));\n"
            "    }\n"
            "}\n"
            "self.step.expect_fill(",
        ),
    ),
    rust(
        "published prefixes",
        "what a failed step was to compute is published",
        (
            "enter",
            "self.doom_in_flight();",
            "self.enter_computed(&step, &vec![0; step.runs.len()])?;\nself.doom_in_flight();",
        ),
    ),
    rust(
        "published prefixes",
        "a block's hash says nothing of what comes before it",
        ("chain_hashes", "content[..parent.len()].copy_from_slice(&parent);", ""),
    ),
    rust(
        "published prefixes",
        "tenants and salts share one root",
        (
            "root_hash",
            "[tenant, &namespace.salt, model_fingerprint]",
            "[&tenant[..0], &namespace.salt[..0], model_fingerprint]",
        ),
    ),
    rust(
        "published prefixes",
        "the adapter is left out of the prefix hash",
        ("root_hash", "(!namespace.adapter.is_empty()).then_some(&namespace.adapter[..])", "None::<&[u8]>"),
    ),
    rust(
        "published prefixes",
        "a prefix of a model with a state is found and published without the state",
        (
            "num_sharable",
            "let is_read = cache_use.reads() && !self.has_recurrent_state;",
            "let is_read = cache_use.reads();",
        ),
        ("enter_computed", "&& !self.geometry.has_recurrent_state", ""),
    ),
    # -- what a sequence does with the prefix cache
    rust(
        "cache use",
        "a fork of a sequence that publishes nothing publishes",
        ("fork", "cache_use: self.cache_use,", "cache_use: CacheUse::default(),"),
    ),
    rust(
        "cache use",
        "a sequence that comes back from the host tier forgets that it publishes nothing",
        ("offload", "cache_use: self.cache_use,", "cache_use: CacheUse::default(),"),
    ),
    rust(
        "cache use",
        "a sequence that only writes takes what is found",
        ("num_sharable", "cache_use.reads()", "cache_use.writes()"),
    ),
    rust(
        "cache use",
        "blocks that a sequence fills and does not publish are shared while a step fills them",
        ("enter_run", "if sequence.cache_use.writes()", "if sequence.num_scheduled > 0"),
    ),
    # -- resets
    rust(
        "resets",
        "content behind a block that is gone outlives a reset of what it continues",
        ("continues", "None => break true,", "None => break false,"),
    ),
    rust(
        "resets",
        "a sequence that comes back from the host tier publishes what a reset has dropped",
        ("restore", "self.num_published = num_found.max(self.num_withheld);", "self.num_published = num_found;"),
    ),
    rust(
        "resets",
        "a reset drops what was published after it had begun",
        (
            "next_part",
            "if is_old && self.is_wanted(books.pool(), block)",
            "let _ = is_old;\nif self.is_wanted(books.pool(), block)",
        ),
    ),
    # -- steps and their reports
    rust(
        "steps",
        "steps planned after a failure fail with it",
        ("doom_in_flight", "self.lease.known_step = step.step_number;", ""),
    ),
    rust(
        "steps",
        "a step behind a failed one can be reported as computed",
        ("enter", "refuse_doomed(step)?;", ""),
    ),
    rust(
        "steps",
        "sampled tokens go by the order of the runs, not by their sequences",
        (
            "tokens_by_run",
            "if is_plain && step.runs.iter().map(|run| run.seq_id).eq(report.sampled_ids.iter().copied())",
            "if is_plain && report.sampled_ids.len() == step.runs.len()",
        ),
    ),
    rust(
        "steps",
        "a step in flight counts and samples beyond a trim",
        (
            "cut",
            "run.end = run.end.min(num_tokens); run.receives &= run.sampled_position < num_tokens;",
            "let _ = run;",
        ),
    ),
    # -- eviction order
    rust(
        "eviction order",
        "a sequence's head is evicted before its tail",
        ("tail_first", ".iter().rev().copied().collect()", ".iter().copied().collect()"),
    ),
    rust(
        "eviction order",
        "a parent is kept shorter than its child",
        ("place", "place = place.max(segment.place).max(worth);", "place = worth;"),
    ),
    # -- reservations
    rust(
        "reservations",
        "a trim takes the blocks that others were promised",
        ("trim", "refuse_if!(room.refuse(trim.seq_id, needed, 0, 0));", "let _ = needed;"),
    ),
    rust(
        "reservations",
        "a reservation ends with its last block and not within it",
        (
            "num_slots",
            "if reserved > 0 { reserved.min(self.max_tokens()) } else { self.max_tokens() };",
            "self.max_tokens();\nlet _ = reserved;",
        ),
    ),
    rust(
        "reservations",
        "a cached block behind one that is being filled is counted on",
        (
            "num_guaranteed",
            "num_guaranteed += hit.tables.iter().map(unpublished).sum::<usize>();",
            "let _ = unpublished;\nnum_guaranteed += 1;",
        ),
    ),
    # -- layer groups
    rust(
        "layer groups",
        "a block of the window is let go with those behind it",
        ("first_seen", "(position + 1).saturating_sub(size)", "(position + 2).saturating_sub(size)"),
    ),
    rust(
        "layer groups",
        "blocks behind a window are free while steps in flight read them",
        ("pass_windows", "lease.let_go(passed, pool)?;", "pool.release(&passed)?;"),
    ),
    rust(
        "layer groups",
        "windows move on with tokens that are scheduled and may not be computed",
        (
            "pass_windows",
            "sequence.num_computed.saturating_sub(1)",
            "sequence.num_scheduled.saturating_sub(1)",
        ),
    ),
    rust(
        "layer groups",
        "the last computed token can't be computed again: its window is gone",
        ("pass_windows", "sequence.num_computed.saturating_sub(1)", "sequence.num_computed"),
    ),
    rust(
        "layer groups",
        "a prefix is found by its full groups alone",
        (
            "limit_to_windows",
            "hit.num_blocks = num_blocks;",
            "let num_blocks = hit.num_blocks.max(num_blocks);",
        ),
    ),
    rust(
        "layer groups",
        "blocks of all groups are published and found as those of one",
        (
            "publish",
            "self.index.publish(&identity(hash, self.groups.of(block)), block)",
            "self.index.publish(hash, block)",
        ),
        (
            "lookup",
            "self.index.lookup(&identity(&self.hashes[index], group))",
            "self.index.lookup(&self.hashes[index])",
        ),
        (
            "find_full",
            "self.hashes[..num_blocks].iter().map(|hash| identity(hash, group)).collect()",
            "self.hashes[..num_blocks].to_vec()",
        ),
        ("find_shareable", "self.pool.index().lookup(&identity(hash, group))", "self.pool.index().lookup(hash)"),
        (
            "prefix_hash",
            "self.index.hash(block).map(|hash| identity(hash, self.groups.of(block)))",
            "self.index.hash(block).copied()",
        ),
    ),
    rust(
        "layer groups",
        "blocks of all groups are published as those of the first one",
        (
            "publish",
            "self.index.publish(&identity(hash, self.groups.of(block)), block)",
            "self.index.publish(hash, block)",
        ),
    ),
    rust(
        "layer groups",
        "a windowed table ends with the tokens that are computed, not with those of the run",
        (
            "make_writable",
            "self.make_table_writable(row, group, num_blocks, geometry.end_of_table(span, num_tokens, end))?;",
            "let end = if span.is_full() { end } else { self.table.get(row).num_scheduled };\n"
            "self.make_table_writable(row, group, num_blocks, geometry.end_of_table(span, num_tokens, end))?;",
        ),
    ),
    rust(
        "layer groups",
        "an admission is charged for its full groups only",
        (
            "admit",
            "hit.num_missing(&ends);",
            "hit.tables.iter().zip(&ends).zip(&geometry.groups).filter(|(_, span)| span.is_full())"
            ".map(|((table, end), _)| end - table.end()).sum::<usize>();",
        ),
    ),
    rust(
        "layer groups",
        "a reservation is for one group",
        (
            "num_to_come",
            "ends.iter().map(|end| num_most.saturating_sub(*end)).sum()",
            "ends.iter().take(1).map(|end| num_most.saturating_sub(*end)).sum()",
        ),
    ),
    rust(
        "layer groups",
        "a fork goes back behind what is left of a window",
        ("fork", "least_position(sequence, self.geometry) + 1", "least_position(sequence, self.geometry).min(0) + 1"),
    ),
    rust(
        "layer groups",
        "a trim goes back behind what is left of a window",
        (
            "trim",
            "least_position(sequence, self.geometry).max(1)",
            "least_position(sequence, self.geometry).min(1).max(1)",
        ),
    ),
    rust(
        "layer groups",
        "blocks that nobody can find are evicted in their turn",
        ("evict_one", "self.groups.pop_stranded()", "None::<BlockId>"),
    ),
    rust(
        "layer groups",
        "a table entry that a report changed is written before windows move on",
        (
            "run",
            "pass_windows(self.lease, self.table, self.pool, self.geometry, &mut self.plan)?;"
            "write_changed_entries(self.lease, self.table, &mut self.plan);",
            "write_changed_entries(self.lease, self.table, &mut self.plan);\n"
            "pass_windows(self.lease, self.table, self.pool, self.geometry, &mut self.plan)?;",
        ),
    ),
    rust(
        "layer groups",
        "a sequence comes back from the host tier with the blocks of another group",
        ("copy_back", "num_before += counts[group];", "num_before += first - num_passed;"),
    ),
    # -- drafts
    rust(
        "drafts",
        "a sequence keeps the length that it had with its drafts",
        (
            "accept_drafts",
            "self.num_scheduled -= self.num_drafts - accepted.len();",
            "",
        ),
    ),
    rust(
        "drafts",
        "rejected drafts become tokens of the sequence, and are published",
        ("accept_drafts", "let accepted = &drafts[..drafts.len() - num_rejected];", "let accepted = &drafts[..];"),
        ("accept_drafts", "run.sampled_position -= num_rejected;", ""),
    ),
    rust(
        "drafts",
        "a rejected draft counts as computed",
        ("accept_drafts", "run.end = run.end.min(run.sampled_position);", ""),
    ),
    rust(
        "drafts",
        "a sequence with drafts in flight is planned again",
        ("find_in_pool", "sequence.num_drafts > 0", "sequence.num_drafts > sequence.num_tokens"),
    ),
    rust(
        "drafts",
        "a window moves on by drafts that may be rejected",
        (
            "pass_windows",
            "sequence.num_computed.saturating_sub(1)",
            "(sequence.num_computed + sequence.num_drafts).saturating_sub(1)",
        ),
    ),
    rust(
        "drafts",
        "slots of rejected drafts are freed with their step, and written by the next one",
        (
            "accept_drafts",
            "self.table.get_mut(run.row).accept_drafts(accepted);",
            "let sequence = self.table.get_mut(run.row);\n"
            "sequence.accept_drafts(accepted);\n"
            "let end = sequence.num_tokens.div_ceil(self.geometry.block_size);\n"
            "if !sequence.released {\n"
            "    self.pool.release(&sequence.blocks_tail_first(end)).unwrap();\n"
            "    sequence.tables.iter_mut().for_each(|table| table.truncate(end));\n"
            "}",
        ),
    ),
    rust(
        "drafts",
        "a sequence gets no slots for its drafts",
        (
            "extend",
            "let num_tokens = sequence.num_tokens + num_appended + num_drafts;",
            "let num_tokens = sequence.num_tokens + num_appended;",
        ),
    ),
    rust(
        "drafts",
        "the drafts of a failed step stay in flight",
        ("forget_uncomputed", "self.num_drafts = 0;", ""),
    ),
    rust(
        "drafts",
        "drafts follow a token that the worker has not sampled",
        ("refuse_drafts", "!sequence.takes_drafts()", "sequence.num_tokens != sequence.num_scheduled + 1"),
    ),
    rust(
        "drafts",
        "the client can send other drafts to the worker than it planned",
        ("schedule_drafts", "&digest_of(drafts)", "&digest_of(&drafts[..1])"),
    ),
    rust(
        "drafts",
        "a report accepts tokens that were no drafts",
        ("last_after", "if others == accepted", "if others.len() == accepted.len()"),
    ),
    rust(
        "drafts",
        "a restart forgets how many tokens a step gave",
        (
            "settle",
            "self.write(&Change::Settle { lease_id: lease_id.into(), report: Cow::Borrowed(report) })",
            "let report = StepReport { sampled_counts: vec![], ..report.clone() };\n"
            "self.write(&Change::Settle { lease_id: lease_id.into(), report: Cow::Owned(report) })",
        ),
    ),
    # -- tenants and quotas
    rust(
        "tenants",
        "nobody keeps a tenant's floor free",
        (
            "num_promised",
            "self.num_reserved.max(self.share.floor.saturating_sub(self.num_held))",
            "self.num_reserved",
        ),
    ),
    rust(
        "tenants",
        "a tenant over its quota takes others' cached blocks",
        ("reclaims", "(!is_asker, std::cmp::Reverse(num_reclaimed)", "(is_asker, std::cmp::Reverse(num_reclaimed)"),
    ),
    rust(
        "tenants",
        "a prompt that waits keeps another tenant's blocks from eviction",
        ("expect_prompt", "names_tenants || *tenant == lease_tenant", "names_tenants || *tenant == *tenant"),
    ),
    rust(
        "tenants",
        "what a waiting prompt has found is kept from eviction as if it still waited",
        ("was_last_waiting", "*count == 0", "*count == u32::MAX"),
    ),
    rust(
        "tenants",
        "any tenant takes back any tenant's pin",
        (
            "unpin_prefix",
            "if self.pins.get(id).filter(is_theirs).is_none()",
            "let _ = is_theirs;\nif self.pins.get(id).is_none()",
        ),
    ),
    rust(
        "tenants",
        "the budget of another tenant decides on a pin",
        ("pin_prefix", "refuse_pin(tenant, &blocks,", "refuse_pin(0, &blocks,"),
    ),
    rust(
        "tenants",
        "a pinned block that no sequence holds is charged to nobody",
        ("refuse_pin", "pool.num_parked(blocks)", "0"),
    ),
    # -- prefixes that breakpoints keep, what they cost, and why admissions find no more
    rust(
        "kept prefixes",
        "a hit without a breakpoint does not renew what it finds",
        ("use_table", "self.pool.keeper().renew(others, now);", ""),
    ),
    rust(
        "kept prefixes",
        "a use with a breakpoint shortens the time of a block",
        ("renew", "keep.ttl = keep.ttl.max(ttl);", "keep.ttl = ttl;"),
    ),
    rust(
        "kept prefixes",
        "times begin anew when plans are made again after a restart",
        (
            "apply",
            "books.plan(lease_id, request, *now, &RequestKey",
            "books.plan(lease_id, request, *now + 60.0, &RequestKey",
        ),
    ),
    rust(
        "kept prefixes",
        "what is kept is evicted as what has no advice",
        ("level", "if self.is_kept(block) { KEPT } else { self.book.level(block) }", "self.book.level(block)"),
    ),
    rust(
        "kept prefixes",
        "the limit of a tenant ends what another one keeps",
        ("limit", "self.parking.end_oldest_keeps(tenant, ", "self.parking.end_oldest_keeps(0, "),
    ),
    rust(
        "kept prefixes",
        "a tenant keeps more than its limit",
        ("use_prefix", "self.pool.keeper().limit(tenant);", ""),
    ),
    rust(
        "kept prefixes",
        "a block with the same tokens that was published first is not kept instead",
        ("publish", "self.pool.keeper().hand_over(block, standing);", ""),
    ),
    rust(
        "kept prefixes",
        "a reset does not end what is kept of a held block",
        ("drop_content", "self.keeper().end_all(&[block]);", ""),
    ),
    rust(
        "kept prefixes",
        "the windows of a breakpoint that come with later steps are not kept",
        ("make_table_writable", "self.keep_fresh(row, group, foreign.into_iter().chain(length..end));", ""),
    ),
    rust(
        "kept prefixes",
        "what a tenant writes is counted twice",
        ("count_admission", "tokens.written += counts.written;", "tokens.written += 2 * counts.written;"),
    ),
    rust(
        "kept prefixes",
        "what is resumed is counted as written again",
        ("answer_admission", "if admission.resumed { 0 } else { num_written }", "num_written"),
    ),
    rust(
        "kept prefixes",
        "a block that is in the index already is counted as written",
        (
            "num_written",
            "hashes[num_found..].iter().filter(is_new).count()",
            "hashes[num_found..].len() + 0 * hashes.iter().filter(is_new).count()",
        ),
    ),
    rust(
        "kept prefixes",
        "an admission waits for a lease that has ended",
        ("fills_elsewhere", "*id != lease_id && !lease.is_ending", "*id != lease_id"),
    ),
    rust(
        "kept prefixes",
        "the reason of a miss has another tenant's eviction as the own one",
        ("own_name", "by == tenant", "by == by"),
    ),
    rust(
        "kept prefixes",
        "the reason of a miss has an operator's reset as the tenant's own",
        (
            "own_name",
            "self.pool.records.callers.name(by) == Some(name)",
            "self.pool.records.callers.name(by).is_some()",
        ),
    ),
    rust(
        "kept prefixes",
        "the reason of a miss tells that another tenant has the block",
        ("explain_miss", "group, false)", "group, true)"),
    ),
    client(
        "kept prefixes",
        "each sample of a prompt that is admitted counts the prompt again",
        ("_add_newcomer", "resumed=sequence.was_admitted or sequence.index > 0", "resumed=sequence.was_admitted"),
    ),
    client(
        "kept prefixes",
        "a prompt that comes back after its blocks were taken counts again",
        ("_add_newcomer", "resumed=sequence.was_admitted or sequence.index > 0", "resumed=sequence.index > 0"),
    ),
    client(
        "kept prefixes",
        "an admission waits for ever for a block that another lease computes",
        ("_add_newcomer", "sequence.num_waits_for_prefix < _MAX_WAITS_FOR_PREFIX", "True"),
    ),
    client(
        "kept prefixes",
        "breakpoints are not sent",
        ("_encode_admission", "message.breakpoints.extend(map(_encode_breakpoint, cache.breakpoints))", ""),
    ),
    gateway(
        "kept prefixes",
        "a diagnosis compares with the answer of another tenant",
        (
            "find",
            "responses = self._tenants.get(tenant)\nreturn None if responses is None else responses.get(response_id)",
            "found = [each[response_id] for each in self._tenants.values() if response_id in each]\n"
            "return found[0] if found else None",
        ),
    ),
    # -- tenants of one lease
    rust(
        "tenants of a lease",
        "the prefix hashes of a sequence begin with the lease's tenant",
        ("admit", "self.lease.root(tenant, ", "self.lease.root(self.lease.tenant, "),
    ),
    rust(
        "tenants of a lease",
        "the blocks of a sequence are charged to the lease's tenant",
        ("asker_for", "Asker { tenant,", "let _ = tenant;\nAsker { tenant: self.lease.tenant,"),
    ),
    rust(
        "tenants of a lease",
        "the limit of the lease's tenant decides on a sequence of another",
        ("room_for", "pool: self.pool, tenant }", "pool: self.pool, tenant: self.lease.tenant.min(tenant) }"),
    ),
    rust(
        "tenants of a lease",
        "a fork has the tenant of the lease",
        (
            "continue_from",
            "let row = self.enter(child);",
            "let row = self.enter(child);\nself.table.get_mut(row).tenant = self.lease.tenant;",
        ),
    ),
    rust(
        "tenants of a lease",
        "the reservation of a released sequence is given back to the lease's tenant",
        ("end", "self.pool.reserve(sequence.tenant,", "self.pool.reserve(self.lease.tenant,"),
    ),
    rust(
        "tenants of a lease",
        "a caller without the role names tenants",
        ("owner_of", "if !names_tenants {", "let _ = names_tenants;\nif false {"),
    ),
    rust(
        "tenants of a lease",
        "a reset of a tenant forgets its sequences in another one's lease",
        (
            "withhold_for",
            "self.leases.rows()",
            "self.leases.values().filter(|lease| tenant == lease.tenant)"
            ".flat_map(|lease| lease.sequences.values().copied())",
        ),
    ),
    rust(
        "tenants of a lease",
        "a watcher sees the blocks of another tenant that change",
        (
            "changes",
            "let is_seen = tenant.is_none_or(|tenant| self.pool.owner(block) == Some(tenant));",
            "let is_seen = tenant.is_none_or(|_| self.pool.owner(block).is_some());",
        ),
    ),
    rust(
        "tenants of a lease",
        "a list of one tenant's sequences has all of the lease",
        (
            "sequences_from",
            "id >= first && tenant.is_none_or(|tenant| self.table.get(row).tenant == tenant);",
            "id >= first && tenant.is_none_or(|_| self.table.get(row).seq_id == id);",
        ),
    ),
    # -- the host tier
    rust(
        "host tier",
        "host blocks are free while they are copied from",
        (
            "copy_back",
            "self.host.retire(&host_blocks)?; self.step.host_holds.push(host_blocks); Ok(())",
            "self.host.release(&host_blocks)",
        ),
    ),
    rust(
        "host tier",
        "an offload leaves out what steps in flight compute",
        (
            "offload",
            "self.geometry.num_blocks_for(sequence.num_scheduled).max(1)",
            "self.geometry.num_blocks_for(sequence.num_computed).max(1)",
        ),
    ),
    rust(
        "host tier",
        "what steps in flight compute is lost with an offload",
        ("offload", "step.hand_over(row, heir, num_tokens);", "step.join(row, heir, num_tokens);"),
    ),
    rust(
        "host tier",
        "a copy of an evicted block makes room while a step copies it back",
        ("bring_back", "self.host.begin_use(&sources); self.step.host_holds.push(sources);", "drop(sources);"),
    ),
    rust(
        "host tier",
        "a copy of an evicted block is found before the step that makes it has ended",
        ("keep_evicted", "self.step.host_arriving.push(copy);", "self.host.arrive(&[copy]);"),
    ),
    rust(
        "host tier",
        "a copy is found that the step of a fenced lease may not have made",
        ("close_lease", "self.host.drop_copies(&step.host_arriving);", ""),
    ),
    rust(
        "host tier",
        "a sequence is offloaded to a host block that is still found as a copy of an evicted block",
        ("allocate", "self.evict(copy);", "self.free.push(copy);"),
    ),
    rust(
        "host tier",
        "a copy is found by the hash of the block before it",
        ("lose", "Content { hash: *hash, group,", "Content { hash: self.index.origin(block).parent, group,"),
    ),
    rust(
        "host tier",
        "a copy behind a block that is gone is found",
        (
            "find_longest",
            "(0..num_blocks).map_while(|index| find(index, group)).collect()",
            "(0..num_blocks).filter_map(|index| find(index, group)).collect()",
        ),
    ),
    rust(
        "host tier",
        "a copy of one layer group is found as that of another",
        ("lose", "Content { hash: *hash, group,", "Content { hash: identity(hash, group), group,"),
    ),
    rust(
        "host tier",
        "a copy comes back to the table of another layer group",
        (
            "bring_back",
            "tables[usize::from(copy.group)].block(copy.index)",
            "tables[0].get(copy.index).unwrap_or_else(|| tables[usize::from(copy.group)].block(copy.index))",
        ),
    ),
    rust(
        "host tier",
        "a full layer group takes blocks of the pool that come behind a copy",
        ("find", "hit.num_leading(group)", "hashes.len()"),
    ),
    rust(
        "host tier",
        "a plan that makes no copies takes a block from the host tier as found",
        (
            "tiers",
            "(self.host_copy_use != HostCopyUse::None).then(|| self.host.copies())",
            "Some(self.host.copies())",
        ),
    ),
    rust(
        "host tier",
        "a reset forgets the copies of evicted blocks",
        (
            "withhold_for",
            "self.host.begin_reset(tenant..tenant + 1, num_changes);",
            "",
        ),
    ),
    rust(
        "host tier",
        "a block is copied to the host tier when it is evicted during the reset that is about it",
        (
            "begin_reset",
            "self.reset_at[tenants.start as usize..tenants.end as usize].fill(num_changes);",
            "let _ = num_changes;",
        ),
    ),
    rust(
        "host tier",
        "a sequence publishes a copy from the host tier that a reset was about",
        ("withhold", "self.cache_use.writes() && num_computed > self.num_published", "num_computed > self.num_tokens"),
    ),
    rust(
        "host tier",
        "a released sequence publishes a block from the host tier that a fork writes on",
        ("forget_claims", "table.get_mut(row).limit_computed(index * block_size);", ""),
    ),
    # -- the disk
    rust(
        DISK_IDEA,
        "a copy makes room in the host tier while it is written to the disk",
        ("write_behind", "host.begin_use(&[block]);", ""),
    ),
    rust(
        DISK_IDEA,
        "a copy makes room on the disk while it is read from there",
        ("bring_up", "self.pool.begin_use(&[*disk]);", ""),
    ),
    rust(
        DISK_IDEA,
        "a copy is found on the disk before it is written",
        ("write_behind", "host.begin_use(&[block]);", "host.begin_use(&[block]); self.pool.arrive(&[disk]);"),
    ),
    rust(
        DISK_IDEA,
        "a plan that skips the disk has copies read from it",
        (
            "refuse_on_disk",
            "admission.waits_for_prefix && !self.skips_disk && self.host_copy_use != HostCopyUse::None",
            "admission.waits_for_prefix && self.host_copy_use != HostCopyUse::None",
        ),
    ),
    rust(
        DISK_IDEA,
        "copies are read from the disk though the host tier has no room for all that their prefix needs",
        ("find_reads", "&& below.len() <= limit", "&& limit > 0"),
    ),
    rust(
        DISK_IDEA,
        "a copy is written to the disk as one of the first layer group",
        (
            "encode_disk_orders",
            "tenant: name(content.tenant), layer_group: content.group.into(),",
            "tenant: name(content.tenant), layer_group: 0,",
        ),
    ),
    worker(
        DISK_IDEA,
        "the copy of another layer group is read from the disk",
        (
            "read",
            "(record.prefix_hash, record.group) != (prefix_hash, group)",
            "record.prefix_hash != prefix_hash",
        ),
    ),
    worker(
        DISK_IDEA,
        "the copies that a worker finds on its disk are all of the first layer group",
        ("content", "layer_groups=[record.group for _, record in part],", ""),
    ),
    rust(
        DISK_IDEA,
        "a copy that could not be read from the disk is found in the host tier",
        ("end_order", "host.drop_copies(&[target]); self.pool.drop_copies(&[disk]);", "host.arrive(&[target]);"),
    ),
    rust(
        DISK_IDEA,
        "a host block is written to the disk by the hash that it had before",
        (
            "write_behind",
            "host.copies().content(block).filter(|content| content.hash == hash)",
            "host.copies().content(block).map(|content| Content { hash, ..content })",
        ),
    ),
    rust(
        DISK_IDEA,
        "a reset forgets the copies on the disk",
        ("begin_reset", "self.pool.begin_reset(tenants, num_changes); self.erase", "let _ = num_changes; self.erase"),
    ),
    rust(
        DISK_IDEA,
        "a reset leaves the content on the disk",
        ("begin_reset", "self.erase(tenant.map(<[u8]>::to_vec));", ""),
    ),
    rust(
        DISK_IDEA,
        "content that is being erased is found again when the worker comes back",
        (
            "enter_found",
            "found.filter(|(_, _, name)| !is_erased(name))",
            "found.filter(|(_, _, name)| !is_erased(&name[..0]))",
        ),
    ),
    rust(
        DISK_IDEA,
        "a copy that was found on the disk takes a block that is being written",
        ("enter", "is_free.get(block as usize) == Some(&true)", "is_free.len() > block as usize"),
    ),
    rust(
        DISK_IDEA,
        "content that could not be erased is found again in the next epoch",
        ("end_erasure", "drop(self.unerased.insert(tenant))", "drop(tenant)"),
    ),
    worker(
        DISK_IDEA,
        "a copy is used that has changed on the disk",
        ("read", "or zlib.crc32(content) != record.content_checksum", ""),
    ),
    worker(
        DISK_IDEA,
        "a copy of another pool is used",
        ("decode_headers", 'is_current & (rows["mark"] == np.void(mark))', "is_current"),
    ),
    worker(
        DISK_IDEA,
        "a copy that is cut off is found",
        ("_scan_file", "block < min(end, self.num_blocks)", "block < self.num_blocks"),
    ),
    worker(
        DISK_IDEA,
        "what could not be overwritten is not erased",
        ("write", "self._uncertain.add(block)", "pass"),
    ),
    worker(
        DISK_IDEA,
        "an erasure leaves the content where the header was",
        ("_clear", "punch_hole(file, offset, self.content_bytes)", "pass"),
    ),
    worker(
        DISK_IDEA,
        "an order of an epoch that is over writes a host block to the disk",
        ("_write", "if epoch != self._epoch:\n                return False", "pass"),
    ),
    worker(
        DISK_IDEA,
        "an order of an epoch that is over writes to a host block",
        ("_read", "if epoch != self._epoch:\n                return False", "pass"),
    ),
    worker(
        DISK_IDEA,
        "a copy is read to a host block while steps of the epoch before still copy",
        ("_read", "self._begun.wait()", "pass"),
    ),
    worker(
        DISK_IDEA,
        "content that a process was writing when it died is not erased",
        ("write", "write_all(file, BEING_WRITTEN, index * HEADER_BYTES)", "pass"),
    ),
    worker(
        DISK_IDEA,
        "a repeated order is carried out again",
        ("obey", "elif number > self.last_order:", "else:"),
    ),
    worker(
        DISK_IDEA,
        "an order that is repeated when it has ended is not reported",
        ("obey", "self.report(number, self._ended[number])", "pass"),
    ),
    worker(
        DISK_IDEA,
        "an erasure overtakes the writes that were ordered before",
        (
            "obey",
            'self._reads if order.WhichOneof("order") == "read" else self._writes',
            'self._writes if order.WhichOneof("order") == "write" else self._reads',
        ),
    ),
    worker(
        DISK_IDEA,
        "copies that were overwritten are on the disk when their tenant was reset",
        (
            "erase",
            "self._clear(number, by_file.get(number, ()))",
            "_ = number in by_file and self._clear(number, by_file[number])",
        ),
    ),
    worker(
        DISK_IDEA,
        "an erasure is reported before it is on the disk",
        ("_clear", "os.fsync(file)", "pass"),
    ),
    worker(
        DISK_IDEA,
        "a flush that failed is repeated",
        ("_clear", "self._path(number).unlink()", "pass"),
    ),
    worker(
        DISK_IDEA,
        "the removal of a file is reported before it is on the disk",
        ("erase", "sync_directory(self.directory)", "pass"),
    ),
    worker(
        DISK_IDEA,
        "a header is written before its content",
        (
            "write",
            "write_all(file, content, offset)",
            "write_all(file, record.encode(self._mark), index * HEADER_BYTES); write_all(file, content, offset)",
        ),
    ),
    worker(
        DISK_IDEA,
        "the end of an order is reported in the epoch after its own",
        ("_end", "if epoch == self._epoch:", "if True:"),
    ),
    worker(
        DISK_IDEA,
        "a worker that starts leaves the content behind a header that is torn",
        ("_scan_file", "self._clear(number, removed)", "pass"),
    ),
    # -- request ids
    rust(
        "request ids",
        "a plan with a request_id that is known is planned again",
        (
            "recall",
            "answer.request_id == key.request_id",
            "answer.request_id.len() > key.request_id.len()",
        ),
    ),
    manager(
        "request ids",
        "a tenant gets another one's lease by its request_id",
        ("recall", "key = tenant, request.request_id", 'key = "", request.request_id'),
        ("remember", "self._calls[tenant, request.request_id]", 'self._calls["", request.request_id]'),
    ),
    # -- audits
    rust(
        "audits",
        "holders of a block are compared with the first one alone",
        ("check_sharing", "*known = (index, sequence, filled);", ""),
    ),
    # -- restart and state
    rust(
        "restart",
        "a damaged record of a log is read",
        ("next_record", "if crc32fast::hash(content).to_le_bytes() != *crc { return None; }", "let _ = crc;"),
    ),
    rust(
        "restart",
        "what a refused plan has done is not written down",
        ("plan", "self.write(&Change::Advance { now })?;", ""),
    ),
    manager(
        "restart",
        "a damaged pool.json is read",
        ("unseal", 'if sealed.get("sha256") != checksum(content):\n    raise ValueError("it is damaged")', "pass"),
    ),
    manager(
        "restart",
        "a cachemgr goes on with an epoch that another one has ruled",
        ("register", "is_ours = registration.attached_term in (0, *known.terms)", "is_ours = True"),
    ),
    manager(
        "restart",
        "books that are behind the worker's steps are taken",
        (
            "lacks",
            "if lease is None or lease.next_step < next_step:\n    return True",
            "del lease, next_step",
        ),
    ),
    # -- leases, their time and their fences
    rust(
        "leases",
        "a lease ends at its first expiry, in spite of renewals",
        (
            "next_expired",
            "Some(lease) if lease.expires_at > now => self.expiry.add(&lease_id, &self.by_id),",
            "",
        ),
    ),
    rust(
        "leases",
        "a lease's blocks come back before the worker has fenced it",
        (
            "end_lease",
            "self.make(&Change::EndLease { lease_id: lease_id.into() })?;",
            "self.make(&Change::CloseLease { lease_id: lease_id.into() })?;",
        ),
    ),
    rust(
        "leases",
        "a lease that has ended goes on planning",
        ("open_mut", ".filter(|lease| lease.is_open())", ""),
    ),
    manager(
        "leases",
        "the time in which no renewal was read counts",
        ("look", "return passed_s - TICK_S if passed_s > UNNOTICED_S else 0.0", "return 0.0 * passed_s"),
    ),
    rust(
        "leases",
        "entries of leases that have ended pile up",
        (
            "add",
            "self.entries.retain(|entry| leases.get(&entry.lease_id).is_some_and(Lease::is_open));",
            "",
        ),
    ),
    manager(
        "leases",
        "a worker fences other pools' leases",
        (
            "lease_fenced",
            "if self._pool_of_lease.get(lease_id) == pool.ledger.pool:",
            "if lease_id in self._pool_of_lease:",
        ),
    ),
    # -- grants and epochs
    rust(
        "grants",
        "a plan for another epoch is taken",
        ("plan", "if epoch != self.epoch {", "if epoch < 0 && epoch != self.epoch {"),
    ),
    manager(
        "watches",
        "a watch goes on past changes that it has lost",
        ("next", "raise cursor_expired(self._ledger, medium)", "return None"),
    ),
    worker(
        "grants",
        "a small grant runs with any signature",
        (
            "check",
            "self._check_signature(signed)",
            "if len(signed.grant) > MAX_UNSIGNED_BYTES:\n    self._check_signature(signed)",
        ),
    ),
    worker(
        "grants",
        "leases of an epoch are open in the next one",
        ("begin_epoch", "self._next_step.clear()", "pass"),
    ),
    worker(
        "grants",
        "a cachemgr that was superseded is obeyed again",
        (
            "obey",
            'if term < self._highest_term:\n    raise ValueError(f"term {term} is below {self._highest_term}, '
            'which was obeyed before")',
            "pass",
        ),
    ),
    worker(
        "grants",
        "leases that ended while the worker was away run on",
        ("attach", "self.fence_lease(lease_id)", "pass"),
    ),
    worker(
        "grants",
        "a step runs twice",
        ("use", "self._next_step[grant.lease_id] = grant.step_number + 1", "pass"),
    ),
    worker(
        "grants",
        "tokens run that cachemgr was not told",
        (
            "match_given_tokens",
            "if digest != grant.given_token_digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]:",
            "if len(digest) != DIGEST_BYTES:",
        ),
    ),
    # -- awaits: between two of them, other callbacks run
    client(
        "awaits",
        "a request waits for its answer only when it is written",
        (
            "send",
            "self._waiting.append((future, late))\ntry:\n    await self._write(call, request, future)",
            "try:\n    await self._write(call, request, future)\n    self._waiting.append((future, late))",
        ),
    ),
    client(
        "awaits",
        "a sequence that ended while its plan was under way is not released",
        (
            "_begin",
            "self._queues.releases[seq_id] = self._queues.blocks_of(sequence) if num_blocks is None else num_blocks",
            "pass",
        ),
    ),
    client(
        "awaits",
        "an engine that was left by its last request while it waited for a lease plans all the same",
        (
            "_turn",
            "await self._reconnect()\nreturn",
            "await self._reconnect()\nsession = self._connection.session\nif session is None:\n    return",
        ),
    ),
    client(
        "awaits",
        "gRPC's word for a stream that breaks while it is written is taken for the engine's end",
        ("send", "if is_being_cancelled():\n    raise", "raise"),
        ("_run", "if is_being_cancelled():", "if isinstance(error, asyncio.CancelledError):"),
    ),
    client(
        "awaits",
        "a write waits for ever on a stream that was given up before it was open",
        ("_write", "if not self._is_open:", "if False:"),
    ),
    client(
        "awaits",
        "an answer to a request that was given up meanwhile ends the reader",
        ("_read", "if not future.done():\n    future.set_result(response)", "future.set_result(response)"),
    ),
    client(
        "awaits",
        "a lease that could not be given back is renewed for ever",
        ("close", "self._keeper.cancel()\nawait asyncio.wait([self._keeper])", "pass"),
    ),
    # -- wake-ups
    client(
        "wake-ups",
        "an idle engine forgets the news that came while it delivered",
        (
            "wait",
            "await self._has_news.wait()",
            "await asyncio.sleep(0)\nself._has_news.clear()\nawait self._has_news.wait()",
        ),
    ),
    client(
        "wake-ups",
        "news that comes while a caller reads is forgotten",
        (
            "generate",
            "if request.error is not None:",
            "request._has_news = False\nif request.error is not None:",
        ),
    ),
    client(
        "wake-ups",
        "a caller that wants whole samples is not told of their ends",
        (
            "_deliver_one",
            "if not request.is_whole or output.finish_reason is not None or output.num_generated == 1:",
            "if not request.is_whole or output.num_generated == 1:",
        ),
    ),
    manager(
        "wake-ups",
        "an admission that waits behind another one is forgotten",
        ("_next", "if self._waiting:", "if False:"),
    ),
    manager(
        "wake-ups",
        "the first lease does not wake the expiry",
        ("_create_lease", "self._expiry.lease_added()", "pass"),
    ),
    manager(
        "wake-ups",
        "a lease that is made while the expiry looks does not wake it",
        (
            "run",
            "await self._changed.wait()\nheld_time",
            "await asyncio.sleep(0)\nself._changed.clear()\nawait self._changed.wait()\nheld_time",
        ),
    ),
    manager(
        "wake-ups",
        "changes that come while a watcher's answer is sent do not wake it",
        ("pause", "await changed.wait()", "changed.clear()\nawait changed.wait()"),
    ),
    client(
        "wake-ups",
        "who waits for an outage waits for the wrong event",
        (
            "_set_outage",
            "self._outage_changed.set()\nself._outage_changed = asyncio.Event()",
            "self._outage_changed = asyncio.Event()",
        ),
    ),
    # -- acknowledgements
    manager(
        "acknowledgements",
        "a report is acknowledged before it is settled",
        (
            "_settle",
            "pool.ledger.settle(report)",
            "asyncio.get_running_loop().call_later(0.03, pool.ledger.settle, report)",
        ),
    ),
    manager(
        "acknowledgements",
        "a restarted cachemgr has forgotten which reports it has",
        ("recover", "pool.acknowledged_report = ledger.inspector.last_report", "pass"),
    ),
    manager(
        "acknowledgements",
        "only the first reports of an epoch are acknowledged",
        ("_acknowledge", "pool.is_acknowledging = False", "pass"),
    ),
    manager(
        "acknowledgements",
        "a report that comes twice is refused",
        ("_settle", "if report.report_number <= pool.acknowledged_report:\n    return", "pass"),
    ),
    worker(
        "acknowledgements",
        "reports that were not acknowledged are not sent again",
        ("_attached", "for report in reports.kept():", "for report in []:"),
    ),
    worker(
        "acknowledgements",
        "a fence is answered before the lease's steps have ended",
        (
            "fence_lease",
            "return self._thread.submit(lambda: self._executor.fence_lease(lease_id))",
            "self._thread.submit(lambda: self._executor.fence_lease(lease_id))\n"
            "done = asyncio.get_running_loop().create_future()\ndone.set_result(None)\nreturn done",
        ),
    ),
    manager(
        "acknowledgements",
        "a fence with an answer that was lost is not sent again",
        ("_attached", "if lease.is_ending:", "if lease.is_ending and lease.lease_id in self._opening:"),
    ),
    manager(
        "acknowledgements",
        "a lease that has expired is not fenced",
        ("run", "self._attachments.fence_lease(pool, lease_id)", "pass"),
    ),
    manager(
        "acknowledgements",
        "a lease that has ended is answered as if it had just been made",
        (
            "CreateLease",
            "self._pools.own_pool(response.lease_id).ledger.inspector.lease(response.lease_id)",
            "pass",
        ),
    ),
    manager(
        "acknowledgements",
        "files that were written before the power was lost are used",
        ("_read", 'if self._boot_id is None or content.get("boot_id") != self._boot_id:', "if self._boot_id is None:"),
    ),
    client(
        "acknowledgements",
        "a plan that was not answered is asked for again as another one",
        (
            "plan_again",
            "return await self.plan(request)",
            "self._num_plans += 1\nrequest.request_id = str(self._num_plans)\nreturn await self.plan(request)",
        ),
    ),
    client(
        "acknowledgements",
        "a step's number counts before the plan is answered",
        ("plan", "response = await", "self._step_number += 1\nresponse = await"),
        ("plan", "if response.step_number != self._step_number + 1:", "if response.step_number != self._step_number:"),
        ("plan", "self._step_number += 1\nself._on_renewal()", "self._on_renewal()"),
    ),
    # -- ABA: what is equal by its number, and is another one
    client(
        "ABA",
        "an answer of an old stream is taken for one of the new epoch",
        ("hang_up", "await self._worker[1].hang_up()", "pass"),
        ("_settle", "if response.step_number != step.step_number:", "if False:"),
    ),
    client(
        "ABA",
        "a sequence takes a token that it sampled under an earlier id",
        (
            "on_step_done",
            "if sequence.seq_id != seq_id or (sequence.state is not _RUNNING and sequence.state is not _DRAINING):",
            "if sequence.state is not _RUNNING and sequence.state is not _DRAINING:",
        ),
    ),
    client(
        "ABA",
        "sequence ids are those of sequences that are not released yet",
        ("_fresh_id", "% _MAX_SEQ_ID", "% 6"),
    ),
    client(
        "ABA",
        "sequences of an epoch that has ended go on in the next one",
        ("_recover", "self._scheduler.reset_all()", "pass"),
    ),
    client(
        "ABA",
        "the steps of a new epoch are counted on from the old one",
        ("follow_epoch", "self._step_number = 0", "pass"),
    ),
    manager(
        "ABA",
        "the end of a worker's old stream detaches its new one",
        (
            "converse",
            "if pool is not None and self._streams.get(pool.ledger.pool) is stream:",
            "if pool is not None and pool.ledger.pool in self._streams:",
        ),
    ),
    manager(
        "ABA",
        "a worker with a history that this cachemgr does not have is attached as a new one",
        ("register", "if registration.attached_term:\n    return NewEpoch(term)", "pass"),
    ),
    manager(
        "ABA",
        "the acknowledgement of an epoch's reports reaches the next epoch",
        ("_acknowledge", "if self._catalog.pool(pool.ledger.pool) is not pool:", "if False:"),
    ),
    worker(
        "ABA",
        "reports of an epoch that has ended are sent in the next one",
        ("begin_epoch", "self._kept.clear()\nself._next_number = 1", "self._next_number = 1"),
    ),
    worker(
        "ABA",
        "a step of an epoch that has ended is reported in the next one",
        ("_ended", "if epoch == self.gate.epoch:", "if epoch:"),
    ),
    worker(
        "ABA",
        "the worker keeps the sequences of an epoch that has ended",
        ("begin_epoch", "self._thread.submit(self._executor.begin_epoch)", "pass"),
    ),
    # -- failed steps on the worker
    worker(
        "failed steps",
        "sampling parameters that came with a step behind a failed one are lost",
        ("_try_to_compute", "self._set_sampling(lease, step)", ""),
        (
            "_try_to_compute",
            "sampling = self._compute(",
            "self._set_sampling(lease, step)\nsampling = self._compute(",
        ),
    ),
    worker(
        "failed steps",
        "a step that was planned before a failure was known is computed",
        (
            "_refused_outcome",
            "if lease.last_failed_step > step.grant.known_step_number and step.grant.run_sequence_ids:",
            "if lease.last_failed_step < 0:",
        ),
    ),
    worker(
        "failed steps",
        "steps behind a grant that could not be applied run on the damaged pool",
        ("_launch", "if self._is_damaged:", "if False:"),
    ),
    # -- requests that move to another pool
    gateway(
        "moves",
        "a request that moves begins anew, though its caller has tokens",
        ("_begin", "delivered=progress.delivered", "delivered=None"),
    ),
    gateway(
        "moves",
        "a sample that has ended goes on in the other pool",
        ("delivered", "Delivered(tuple(ids), has_ended)", "Delivered(tuple(ids), False)"),
    ),
    gateway(
        "moves",
        "a request with samples that have all ended is moved",
        ("__anext__", "if not self._progress.has_ended:\n    self._move(error)", "self._move(error)"),
    ),
    gateway(
        "moves",
        "a request that moves draws with another seed",
        (
            "_begin",
            "self._chunks = self._member.engine.generate(",
            "params = replace(params, seed=(params.seed or 0) + self._num_moves)\n"
            "self._chunks = self._member.engine.generate(",
        ),
    ),
    # -- the batch of decodes of an engine
    worker(
        "memory",
        "the last report is kept after its acknowledgement",
        ("acknowledge", "self._kept[0].report_number <= report_number", "self._kept[0].report_number < report_number"),
    ),
    manager(
        "memory",
        "a watcher that has gone is told of changes",
        ("listening", "del listeners[changed.set]", "pass"),
    ),
    client(
        "batch",
        "a sequence that leaves the pool stays in the batch of decodes",
        (
            "_release",
            "if sequence.batch is None:\n    self.unbatched.remove(sequence)\nelse:\n    self.batch.remove(sequence)",
            "pass",
        ),
    ),
    client(
        "batch",
        "the sequences of a batch that is disbanded run no more",
        ("disband", "self.unbatched = self.running.copy()", "pass"),
    ),
    client(
        "batch",
        "a sequence with its last token planned decodes on",
        ("advance", "for sequence in ended:\n    self.remove(sequence)", "ended = ()"),
    ),
    # -- beams of an engine
    client(
        "beams",
        "a beam takes the blocks of the best one, not those of the beam that it continues",
        ("branch", "self._queues.follow(child, parents[heir.parent])", "self._queues.follow(child, parents[0])"),
    ),
    client(
        "beams",
        "a beam that has ended goes on",
        (
            "step",
            "running = [heir for heir in heirs if heir.token_id not in self._end_token_ids][:width]",
            "running = heirs[:width]",
        ),
    ),
    client(
        "beams",
        "the length of a score leaves out the end token",
        ("_end", "len(token_ids) ** self._params.length_penalty", "max(1, len(output)) ** self._params.length_penalty"),
    ),
    client(
        "beams",
        "the end of a search is seen a step late",
        ("step", "self._length += 1", "self._length += 1\nnum_ended = len(self._ended)"),
        (
            "step",
            "not self._can_improve(running[0])",
            "(num_ended >= width and not self._can_improve(running[0]))",
        ),
    ),
    client(
        "beams",
        "an end token that is not among the best ends a beam",
        ("step", "for heir in heirs[:width]:", "for heir in heirs:"),
    ),
    # -- tenants of an engine
    client(
        "fairness",
        "a tenant with fewer running sequences than another has its place in the line, and no better one",
        ("_place_of", "return min(last_served, tag_of(peer) - 1)", "return last_served"),
    ),
    client(
        "fairness",
        "a tenant that asked for nothing has saved it up",
        ("add", "max(account.next_tag, self._place_of(", "max(account.next_tag, 0 * self._place_of("),
    ),
    client(
        "fairness",
        "what a tenant leaves of a step is lost",
        ("divide", "open_tenants = [tenant for tenant in open_tenants if given[tenant] < demands[tenant]]", "break"),
    ),
    client(
        "fairness",
        "the last request of a tenant takes its account with it while others of it live",
        ("end", "if not self._accounts[key].num_living:", "if self._accounts[key]:"),
    ),
    # -- KV events: a consumer never hears of a block before its parent
    events(
        "KV events",
        "a block is published before its parent",
        ("_publish", "for node in reversed(path):", "for node in path:"),
    ),
    events(
        "KV events",
        "blocks are removed, a parent before its children",
        ("_end_moment", "withdrawn += self._withdraw(prefix_hash)", "withdrawn += self._withdraw(prefix_hash)[::-1]"),
    ),
    events(
        "KV events",
        "the first block of a change names a parent that is not its own",
        ("_end", "BlocksStored(first.parent_hash, blocks,", "BlocksStored(first.block.prefix_hash, blocks,"),
    ),
    # -- the watch's promise: docs/reference/watch.md
    rust(
        PROMISE_IDEA,
        "unique: a block that was told ahead of its changes is told again with each of them",
        ("changes_in", "if number < known_until {", "if number < known.next {"),
    ),
    rust(
        PROMISE_IDEA,
        "unique: a block is told again that changed before its page of a snapshot",
        ("read_page", "self.pages.push((end, num_changes));", "let _ = (end, num_changes);"),
    ),
    rust(
        PROMISE_IDEA,
        "reliable: a tenant is not told of a block that it lost between two parts",
        (
            "tell",
            "let (blocks, events): (Vec<BlockId>, Vec<BlockEvent>) = "
            "changes.into_iter().filter_map(|change| Some((change.block, event_of(change)?))).unzip();",
            "let blocks: Vec<BlockId> = changes.iter().map(|change| change.block).collect();\n"
            "let events: Vec<BlockEvent> = changes.into_iter().filter_map(event_of).collect();",
        ),
    ),
    manager(
        PROMISE_IDEA,
        "ordered: an answer has the cursor of the answer before it",
        (
            "_ended",
            "self._told_numbers = tuple(known.number for known in self._known.values())\n"
            "response.cursor = Place(self.epoch, self._told_numbers).cursor",
            "response.cursor = Place(self.epoch, self._told_numbers).cursor\n"
            "self._told_numbers = tuple(known.number for known in self._known.values())",
        ),
    ),
    manager(
        PROMISE_IDEA,
        "unique: an answer is sent twice",
        ("watch_blocks", "yield change", "yield change\nyield change"),
    ),
    manager(
        PROMISE_IDEA,
        "reliable: a large answer lacks its last event",
        ("next", "response.MergeFromString(events)", "response.MergeFromString(events)\ndel response.events[4:]"),
    ),
    manager(
        PROMISE_IDEA,
        "reliable: the ends of pins and of advice are not told while nothing else happens",
        (
            "watch_blocks",
            "while catalog.pool(name).ledger.epoch == changes.epoch:\n    ledger.advance(clock())",
            "while catalog.pool(name).ledger.epoch == changes.epoch:\n    pass",
        ),
    ),
    manager(
        PROMISE_IDEA,
        "atomic: a part of a moment has a cursor",
        ("next", "is_whole=not self._has_more", "is_whole=True"),
    ),
    manager(
        PROMISE_IDEA,
        "atomic: a snapshot has a cursor though blocks changed since it began",
        ("snapshot", "is_whole=is_end and not self._num_waiting()", "is_whole=is_end"),
    ),
    manager(
        PROMISE_IDEA,
        "atomic: a moment that ends with changes of other tenants has no cursor",
        ("_owes_cursor", "return self._is_in_part or any(", "return any("),
    ),
    rust(
        PROMISE_IDEA,
        "reliable: nothing is told of a copy that is evicted from its tier",
        (
            "remove",
            "self.index.forget(block + 1); self.journal.touch_content(block, copy.content.tenant);",
            "self.index.forget(block + 1);",
        ),
    ),
    rust(
        PROMISE_IDEA,
        "reliable: a tenant is not told that its copy made room for another tenant's",
        ("changes_of_copies", "let is_told = tenant.is_none() || was_own;", "let is_told = tenant.is_none();"),
    ),
    rust(
        PROMISE_IDEA,
        "reliable: a page of a snapshot ends with a copy that the next page leaves out",
        (
            "snapshot_of_copies",
            "let following = stored.next().map(|event| event.block.unwrap_or_default().block_id as TierBlockId);",
            "let following = stored.next().map(|event| event.block.unwrap_or_default().block_id as TierBlockId + 1);",
        ),
    ),
    manager(
        PROMISE_IDEA,
        "atomic: an answer has a cursor while changes of copies wait",
        (
            "_num_waiting",
            "for medium, known in self._known.items()",
            'for medium, known in self._known.items() if medium == "device"',
        ),
    ),
    manager(
        PROMISE_IDEA,
        "resumable: a cursor is forgotten",
        ("watch_blocks", "if place is not None and place.epoch == ledger.epoch:", "if False:"),
    ),
    manager(
        PROMISE_IDEA,
        "resumable: a cursor of an epoch that has ended goes on in the next one",
        ("watch_blocks", "if place is not None and place.epoch == ledger.epoch:", "if place is not None:"),
    ),
    manager(
        PROMISE_IDEA,
        "bounded delay: changes wait for three intervals",
        ("pause", "self._looked_at + INTERVAL_S", "self._looked_at + 3 * INTERVAL_S"),
    ),
    manager(
        PROMISE_IDEA,
        "ordered: of the list of pools, the first of two changes is told last",
        ("touch", "self._last.pop(pool, None)\nself._last[pool]", "self._last[pool]"),
    ),
    manager(
        PROMISE_IDEA,
        "unique: a worker that registers again as it was is a change of its pool",
        ("_attach_again", "before != (True, registration.worker_address)", "True"),
    ),
    manager(
        PROMISE_IDEA,
        "unique: an answer about the list of pools is sent twice",
        ("watch_pools", "number = told[-1][1] if told else number", "number = told[-1][1] - 1 if told else number"),
    ),
    manager(
        PROMISE_IDEA,
        "reliable: a change of the list while its last answer is read wakes nobody",
        (
            "watch_pools",
            "await changed.wait()",
            "changed.clear()\nawait changed.wait()",
        ),
    ),
    manager(
        PROMISE_IDEA,
        "reliable: a watch of the list is not told that a worker has gone",
        ("detach", "self.journal.touch(pool.ledger.pool)", "pass"),
    ),
    manager(
        PROMISE_IDEA,
        "reliable: a watch of the list is not told of a new epoch",
        ("_begin", "self.journal.touch(registration.pool)", "pass"),
    ),
    manager(
        PROMISE_IDEA,
        "reliable: a watch of the list is not told of other adapters",
        (
            "set_adapters",
            "pool.set_adapters(adapters)\nself.journal.touch(pool.ledger.pool)",
            "pool.set_adapters(adapters)",
        ),
    ),
    manager(
        PROMISE_IDEA,
        "reliable: pools of before a warm restart are not in the list of a watch",
        ("recover", "self.journal.touch(saved.pool)", "pass"),
    ),
    manager(
        PROMISE_IDEA,
        "atomic: a part of a long list is complete",
        ("watch_pools", "is_complete = number == journal.num_changes", "is_complete = bool(told)"),
    ),
    manager(
        PROMISE_IDEA,
        "resumable: a watch of the list does not begin anew, and a pool that is gone stays",
        ("watch_pools", "cleared=is_first", "cleared=False"),
    ),
    manager(
        PROMISE_IDEA,
        "bounded delay: changes of the list wait for three intervals",
        ("watch_pools", "looked_at + INTERVAL_S", "looked_at + 3 * INTERVAL_S"),
    ),
    gateway(
        PROMISE_IDEA,
        "the router keeps a pool that the next cachemgr does not have",
        ("_take", "self._coming = {}", "pass"),
    ),
    gateway(
        PROMISE_IDEA,
        "the router does not ask for adapters that have changed",
        ("_update", "self._learn_adapters(member)", "pass"),
    ),
    events(
        PROMISE_IDEA,
        "atomic: `quire events` publishes a part of a moment",
        ("apply", "return self._end_moment() if answer.cursor else []", "return self._end_moment()"),
    ),
    events(
        PROMISE_IDEA,
        "reliable: an evicted block behind a window hides those that follow",
        ("_drop_if_needless", "(children and not self.layout.has_full)", "False"),
    ),
    events(
        PROMISE_IDEA,
        "reliable: a prefix is published without the blocks of a window",
        ("is_found", "all(run >= number for run, number in zip(runs, needed, strict=True))", "runs[0] >= needed[0]"),
    ),
    events(
        PROMISE_IDEA,
        "resumable: a replay lacks the first batch that a consumer missed",
        ("since", "each[0] >= sequence", "each[0] > sequence"),
    ),
    events(
        PROMISE_IDEA,
        "reliable: a replay begins with a later batch than the first one that a consumer missed",
        ("since", "sequence < self._batches[0][0]", "False"),
    ),
    # -- adapters
    worker(
        ADAPTERS_IDEA,
        "an adapter in use makes room for another one",
        ("find_room", "if each != identity and not is_used(each)", "if each != identity"),
    ),
    worker(
        ADAPTERS_IDEA,
        "an adapter that only forks have is not in use",
        ("accept", "sequences[child] = sequences[parent]", "pass"),
    ),
    worker(
        ADAPTERS_IDEA,
        "a sequence in the host tier does not keep its adapter",
        (
            "accept",
            "for seq_id in grant.released_sequence_ids:",
            "for seq_id in (*grant.released_sequence_ids, *grant.offloaded_sequence_ids):",
        ),
    ),
    worker(
        ADAPTERS_IDEA,
        "a run with an adapter that is not there is accepted",
        (
            "check_adapters",
            "(identity := adapter_of(grant, run)) not in known",
            "not (identity := adapter_of(grant, run))",
        ),
    ),
    worker(
        ADAPTERS_IDEA,
        "the tokens of a batch have the adapter of the sequence behind theirs",
        (
            "tokens_of_adapters",
            "zip(adapters, pairwise(accumulate(counts, initial=0)), strict=True)",
            "zip([*adapters[1:], adapters[0]], pairwise(accumulate(counts, initial=0)), strict=True)",
        ),
    ),
    worker(
        ADAPTERS_IDEA,
        "a layer keeps the update of an adapter that has gone",
        ("remove", "if number != adapter", "if True"),
    ),
    worker(
        ADAPTERS_IDEA,
        "adapters of other scalings have one identity",
        ("identity", 'digest.update(struct.pack("<d", update.scaling))', "pass"),
    ),
    rust(
        ADAPTERS_IDEA,
        "a tenant uses the adapter of another one",
        ("refuse", "allowed.as_ref().is_none_or(|allowed| allowed.contains(*name))", "true || name.is_empty()"),
    ),
    rust(
        ADAPTERS_IDEA,
        "a dry run takes an adapter that a plan would refuse",
        (
            "check_admission",
            "self.adapters.refuse_admission(admission, tenant, &self.adapter_rights).or(check.refusal)",
            "check.refusal",
        ),
    ),
    rust(
        ADAPTERS_IDEA,
        "a reset of one adapter is a reset of the base",
        (
            "begin_reset",
            "salt.map(|salt| namespace_of(salt, adapter))",
            "salt.map(|salt| namespace_of(salt, &adapter[..0]))",
        ),
    ),
    manager(
        ADAPTERS_IDEA,
        "a tenant sees the names of adapters that it may not use",
        ("encode_pool_without_counts", "shown_adapters is None or name in shown_adapters", "True"),
    ),
    # -- a GPU: what its start depends on
    worker(
        GPU_IDEA,
        "every GPU is the first one",
        ("pick_device", "index = device.index or 0", "index = 0"),
    ),
    worker(
        GPU_IDEA,
        "the thread that waits for the device has not made it its own",
        ("serve", "thread.submit_ahead(lambda: use_device(", "thread.submit(lambda: use_device("),
    ),
    worker(
        GPU_IDEA,
        "a forward that waits for the device is captured",
        ("waits_refused", 'torch.cuda.set_sync_debug_mode("error")', 'torch.cuda.set_sync_debug_mode("default")'),
    ),
    worker(
        GPU_IDEA,
        "a capture that fails names what its failure led to",
        ("first_cause", "isinstance(error.__context__, Exception)", "False"),
    ),
    worker(
        GPU_IDEA,
        "the pool leaves no room for the widest decode step",
        ("run_largest_step", ", (decodes, True)", ""),
    ),
    worker(
        GPU_IDEA,
        "a step on a GPU may hang for ever",
        (
            "make_watchdog",
            "limit_s = default_s if config.step_timeout_s is None else config.step_timeout_s",
            "limit_s = config.step_timeout_s or 0.0",
        ),
    ),
    # -- drafts that a step verifies
    worker(
        VERIFIED_IDEA,
        "a draft is accepted behind one that was rejected",
        (
            "keep",
            "is_kept = (before == before.index_select(0, first)) & (tokens != VOID)",
            "is_kept = (missed.roll(1) == 0) | (first == torch.arange(len(tokens), device=tokens.device))",
        ),
    ),
    worker(
        VERIFIED_IDEA,
        "the sampled token of a rejected row is the sequence's last one",
        ("newest", "self._firsts + kept.counts - 1", "self._firsts + indices(self.counts, tokens.device) - 1"),
    ),
    worker(
        VERIFIED_IDEA,
        "penalties count the tokens behind rejected drafts",
        ("_remember", "is_kept = penalties.subset.take(kept.is_kept)", "is_kept = torch.ones_like(index) > 0"),
    ),
    worker(
        VERIFIED_IDEA,
        "penalties do not count the drafts before a row",
        (
            "_penalize",
            "before = None if drafts is None else self._before(drafts, penalties.subset.places)",
            "before = None",
        ),
    ),
    worker(
        VERIFIED_IDEA,
        "bad words do not know the drafts before a row",
        ("_last_tokens_of", "if drafts is None:", "if True:"),
    ),
    worker(
        VERIFIED_IDEA,
        "a row behind drafts draws with the number of another position",
        (
            "_sample_drafts",
            "position_of = drafts.repeat(positions) + drafts.offsets",
            "position_of = drafts.repeat(positions) + np.maximum(drafts.offsets - 1, 0)",
        ),
    ),
    worker(
        VERIFIED_IDEA,
        "a draft is accepted behind a mask that was not made",
        ("finish", "voids += range(first + max(1, num_kept), first + num_masks)", "pass"),
    ),
    worker(
        VERIFIED_IDEA,
        "a grammar's matcher goes on behind all drafts",
        ("_follow", "ahead = following.fork() if run.drafts else following", "ahead = following"),
    ),
    worker(
        VERIFIED_IDEA,
        "a report counts the tokens of rejected drafts as computed",
        ("make_report", " - rejected_drafts(grant, result)", ""),
    ),
    worker(
        VERIFIED_IDEA,
        "the slots of rejected drafts count as computed",
        ("_forget_rejected", "self._put(run.sequence, position, None)", "pass"),
    ),
    worker(
        VERIFIED_IDEA,
        "a run with more drafts than the worker takes is accepted",
        ("check_drafts", "if not 0 <= count <= max_drafts:", "if count < 0:"),
    ),
    # -- several ranks
    worker(
        RANKS_IDEA,
        "a rank has another key/value head than its query heads belong to",
        ("keep", "head = rank * self.num_kv_heads // size", "head = rank % self.num_kv_heads"),
    ),
    worker(
        RANKS_IDEA,
        "a rank's query heads find the group size of the whole model",
        ("keep", "attention.num_key_value_groups = self.num_query_heads // size", "pass"),
    ),
    worker(
        RANKS_IDEA,
        "a norm of each head's own is taken for one that all heads have",
        ("_find_obstacle", "parameter.shape != (head_dim,)", "parameter.shape[-1] != head_dim"),
    ),
    worker(
        RANKS_IDEA,
        "a follower computes a step that only changes tables",
        ("read_step", "return AcceptedStep(grant, skip=True)", "return AcceptedStep(grant)"),
    ),
    worker(
        RANKS_IDEA,
        "a follower takes the tokens of one run for another's",
        (
            "read_step",
            "counts = [num_given(grant, run) for run in given_runs.tolist()]",
            "counts = list(grant.run_token_counts)[: len(given_runs)]",
        ),
    ),
    # -- drafts in the engine
    client(
        "drafts",
        "an accepted token is taken twice",
        ("accept_all", "in enumerate(token_ids):", "in enumerate([token_ids[0], *token_ids]):"),
    ),
    client(
        "drafts",
        "an accepted token is delivered twice",
        ("deliver", "for index in range(last):", "for index in (*range(last), *range(bool(last))):"),
    ),
    client(
        "drafts",
        "tokens behind a stop are kept",
        ("accept_all", "if reason is not None:", "if reason is not None and index == len(token_ids) - 1:"),
    ),
    client(
        "drafts",
        "the engine plans a sequence again while its drafts are in flight",
        ("num_schedulable_tokens", "if self.is_held and self._num_sampling:", "if not self.token_ids:"),
    ),
    client(
        "drafts",
        "answers of one tenant are drafts of another",
        ("of", "key = tenant, salt", 'key = "", salt'),
    ),
    client(
        "drafts",
        "a plan that cachemgr is not ready for ends the request",
        ("_refuse_extends", 'if error.reason == "SEQUENCE_BUSY":', 'if error.reason == "SEQUENCE_BUSYS":'),
    ),
    # -- memory that outlives its worker: what was published goes on, and nothing else
    rust(
        "kept memory",
        "sequences and steps of the dead worker hold their blocks in the new epoch",
        ("begin_epoch", "self.empty_leases()?;", ""),
    ),
    rust(
        "kept memory",
        "a block with damaged content is found in the new epoch",
        ("begin_epoch", "self.drop_blocks(&dropped, now, DROPPED_BY);", ""),
    ),
    manager(
        "kept memory",
        "older memory goes on with newer books, and newer memory with older ones",
        ("why_empty", "if not least <= kept.num_accepted_steps <= most:", "if False:"),
    ),
    manager(
        "kept memory",
        "the empty memory of a holder that was started again is taken for the old one",
        (
            "why_empty",
            "if not registration.memory_id or known.memory_id != registration.memory_id:",
            "if False:",
        ),
    ),
    manager(
        "kept memory",
        "an epoch goes on that another cachemgr has ruled since",
        ("why_empty", "if kept.attached_term not in known.terms:", "if False:"),
    ),
    worker(
        HOLDER_IDEA,
        "the memory is lent to a second worker",
        ("_answer", "if self._borrower is not None and self._borrower is not connection:", "if False:"),
    ),
    worker(
        HOLDER_IDEA,
        "a second worker writes to memory that is lent twice",
        ("_take_lock", "fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
    ),
    worker(
        HOLDER_IDEA,
        "a block that was being written counts as whole",
        ("begin_writing", "self._records[changed] = 0", "pass"),
    ),
    worker(
        HOLDER_IDEA,
        "a step that ends late records a block that the next one writes",
        ("end_writing", "same = self._num_written[filled] == before", "same = before == before"),
    ),
    worker(
        HOLDER_IDEA,
        "memory of which the deposit was never made is taken over",
        ("__init__", "is_complete = not deposits or borrowed.deposit is not None", "is_complete = True"),
    ),
    worker(
        HOLDER_IDEA,
        "blocks that a warm-up writes keep their records",
        ("__init__", "self.begin_writing = kept.begin_writing", "self.begin_writing = lambda block_ids: None"),
    ),
    # -- numbers with scales
    worker(
        QUANTIZED_IDEA,
        "pools with other scales have the same fingerprint",
        ("set_kv_scales", 'model.fingerprint += f":kv-{ranks.combined(_digest(scales))}"', "pass"),
    ),
    worker(
        QUANTIZED_IDEA,
        "keys and values are read without their scale",
        ("_as_read", "x.to(dtype) if scale is None else (x.float() * scale).to(dtype)", "x.to(dtype)"),
    ),
    worker(
        QUANTIZED_IDEA,
        "the second half of an expert's rows has the scales of the first",
        (
            "layers",
            "layer._buffers = {name: part[number] for name, part in parts.items()}",
            'layer._buffers = {name: part[0 if "scale" in name else number] for name, part in parts.items()}',
        ),
    ),
    worker(
        QUANTIZED_IDEA,
        "the two numbers of a byte of MXFP4 are swapped",
        (
            "dequantized",
            "torch.stack((packed & 15, packed >> 4), dim=-1)",
            "torch.stack((packed >> 4, packed & 15), dim=-1)",
        ),
    ),
    worker(
        QUANTIZED_IDEA,
        "the zero points of 4 bits are lost when they are packed for a GPU",
        ("_pack", "layer.zero_points()", "8"),
    ),
    worker(
        QUANTIZED_IDEA,
        "columns of 4 bits are packed for a GPU in the groups of their neighbours",
        ("_pack", "group_of_column=layer.groups()", "group_of_column=None"),
    ),
]

_NEW_EPOCH = frozenset({"damage", "kill", "terminate", "power loss", "full disk", "oversleep", "clock"})
NEEDS: dict[str, frozenset[str]] = {
    "a report that comes twice is refused": frozenset({"doubled report"}),
    "a report is acknowledged before it is settled": frozenset({"kill", "terminate", "power loss"}),
    "a restarted cachemgr has forgotten which reports it has": frozenset({"kill", "terminate", "power loss"}),
    "files that were written before the power was lost are used": frozenset({"power loss"}),
    "sampling parameters that came with a step behind a failed one are lost": frozenset({"failed step", "damage"}),
    "a step that was planned before a failure was known is computed": frozenset({"failed step"}),
    "steps behind a grant that could not be applied run on the damaged pool": frozenset({"damage"}),
    "a step of an epoch that has ended is reported in the next one": _NEW_EPOCH,
    "sequences of an epoch that has ended go on in the next one": _NEW_EPOCH,
    "the steps of a new epoch are counted on from the old one": _NEW_EPOCH,
    "the acknowledgement of an epoch's reports reaches the next epoch": _NEW_EPOCH,
    "a request that moves begins anew, though its caller has tokens": frozenset({"uses router"}),
    "a sample that has ended goes on in the other pool": frozenset({"uses router"}),
    "a request with samples that have all ended is moved": frozenset({"uses router"}),
    "a request that moves draws with another seed": frozenset({"uses router"}),
    "changes that come while a watcher's answer is sent do not wake it": frozenset({"has watcher"}),
    "a watcher that has gone is told of changes": frozenset({"has watcher"}),
    "a released sequence publishes a block from the host tier that a fork writes on": frozenset({"host tier"}),
    "a sequence that comes back from the host tier forgets that it publishes nothing": frozenset({"host tier"}),
    "a sequence that comes back from the host tier publishes what a reset has dropped": frozenset({"reset"}),
    "a sequence comes back from the host tier with the blocks of another group": frozenset({"host tier"}),
    "a reset forgets the copies of evicted blocks": frozenset({"reset"}),
    "a block is copied to the host tier when it is evicted during the reset that is about it": frozenset({"reset"}),
    "a sequence publishes a copy from the host tier that a reset was about": frozenset({"reset"}),
    "a reset does not end what is kept of a held block": frozenset({"reset"}),
    "nobody keeps a tenant's floor free": frozenset({"has shares"}),
    "a tenant over its quota takes others' cached blocks": frozenset({"has shares"}),
    "the limit of the lease's tenant decides on a sequence of another": frozenset({"has shares"}),
    "what a tenant writes is counted twice": frozenset(),
    "what is resumed is counted as written again": frozenset(),
    "a block that is in the index already is counted as written": frozenset(),
    "an admission waits for a lease that has ended": frozenset(),
    "an admission waits for ever for a block that another lease computes": frozenset(),
    "each sample of a prompt that is admitted counts the prompt again": frozenset(),
    "a prompt that comes back after its blocks were taken counts again": frozenset(),
}
"""Features and faults of simulated schedules, by bug: without any of them it can't show."""
_WINDOWS = frozenset({"model: window", "model: full and window", "model: full and chunks"})
NEEDS_OF_IDEA = {
    "drafts": frozenset({"has drafts"}),
    DISK_IDEA: frozenset({DISK}),
    "failed steps": frozenset({"failed step", "damage"}),
    "host tier": frozenset({"host tier"}),
    "kept prefixes": frozenset({"has breakpoints"}),
    "layer groups": _WINDOWS,
    "moves": frozenset({"uses router"}),
    "resets": frozenset({"reset"}),
    "restart": frozenset({"keeps state"}),
    "watches": frozenset({"has watcher"}),
    PROMISE_IDEA: frozenset({"has watcher"}),
    VERIFIED_IDEA: frozenset({"has drafts"}),
}
"""The same for the other bugs of an idea."""


def needs_of(bug: Bug) -> frozenset[str]:
    """Return the features and faults without any of which a bug can't show; without one it can show everywhere."""
    return NEEDS.get(bug.name, NEEDS_OF_IDEA.get(bug.idea, frozenset()))


_ABSENT_OF_IDEA = {
    GPU_IDEA: "GPUs",
    ADAPTERS_IDEA: "adapters",
    RANKS_IDEA: "the layers of a large model",
    HOLDER_IDEA: "holders",
    QUANTIZED_IDEA: "tensors",
    "kept memory": "holders",
}
_ABSENT = {
    "disks with copies of another pool": ["a copy of another pool is used"],
    "adapters": ["the adapter is left out of the prefix hash"],
    "models with a state": ["a prefix of a model with a state is found and published without the state"],
    "pins": [
        "any tenant takes back any tenant's pin",
        "the budget of another tenant decides on a pin",
        "a pinned block that no sequence holds is charged to nobody",
        "reliable: the ends of pins and of advice are not told while nothing else happens",
    ],
    "roles": ["a caller without the role names tenants", "a tenant gets another one's lease by its request_id"],
    "resets of one tenant": ["a reset of a tenant forgets its sequences in another one's lease"],
    "watchers of one tenant": [
        "a watcher sees the blocks of another tenant that change",
        "reliable: a tenant is not told of a block that it lost between two parts",
        "atomic: a moment that ends with changes of other tenants has no cursor",
    ],
    "lists of sequences": ["a list of one tenant's sequences has all of the lease"],
    "a second cachemgr": [
        "a cachemgr goes on with an epoch that another one has ruled",
        "a cachemgr that was superseded is obeyed again",
    ],
    "clients that forge or change grants": [
        "a small grant runs with any signature",
        "tokens run that cachemgr was not told",
        "a run with more drafts than the worker takes is accepted",
        "the client can send other drafts to the worker than it planned",
    ],
    "workers that fence leases of others": ["a worker fences other pools' leases"],
    "grammars": [
        "a draft is accepted behind a mask that was not made",
        "a grammar's matcher goes on behind all drafts",
    ],
    "diagnoses of callers": ["a diagnosis compares with the answer of another tenant"],
    "books that are wrong": ["holders of a block are compared with the first one alone"],
}
NOT_SIMULATED = {
    **{name: part for part, names in _ABSENT.items() for name in names},
    **{bug.name: _ABSENT_OF_IDEA[bug.idea] for bug in BUGS if bug.idea in _ABSENT_OF_IDEA},
    **{bug.name: "`quire events`" for bug in BUGS if bug.package == "integrations"},
}
"""The part that simulated schedules lack, by bug: without it the bug can't show."""

KEPT_AWAY_BY = {
    "a lease that has ended is answered as if it had just been made": "`integration/test_ownership.py`",
    "a write waits for ever on a stream that was given up before it was open": "`unit/client/test_client_errors.py`",
    "gRPC's word for a stream that breaks while it is written is taken for the engine's end": (
        "`unit/client/test_client_errors.py`"
    ),
    "an engine that was left by its last request while it waited for a lease plans all the same": (
        "`unit/engine/test_engine.py`"
    ),
    "an answer of an old stream is taken for one of the new epoch": "`unit/engine/test_engine.py`",
    "the end of a worker's old stream detaches its new one": "`integration/test_streams.py`",
    "sampling parameters that came with a step behind a failed one are lost": "`integration/test_ownership.py`",
    "steps behind a grant that could not be applied run on the damaged pool": "`integration/test_failures.py`",
}
"""Tests that were written for a bug of the table in tests/README.md that is put back here."""
