"""`quire lab eviction`: the loads, hits relative to LRU's, the summaries, and the errors of its input."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from quire.lab import __main__ as commands
from quire.lab.eviction import Hits, Pair, Summary, after_changes, by_kind, judge, turnovers_of, worst
from quire.lab.eviction_loads import Kind, Recipe, choose_recipes
from quire.lab.replay import Replay
from quire.lab.requests import Prompt

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"

NEWEST_FIRST = """
class Newest:
    def __init__(self, num_blocks):
        self.parked = {}

    def admit(self, found, fresh, hashes):
        pass

    def park(self, blocks):
        self.parked.update(dict.fromkeys(blocks))

    def unpark(self, blocks):
        for block in blocks:
            del self.parked[block]

    def forget(self, blocks):
        pass

    def evict(self, count):
        victims = list(self.parked)[-count:]
        self.unpark(victims)
        return victims
"""


def made(name: str) -> list[Recipe]:
    return choose_recipes(None, name)


def loop(num_prompts: int, rounds: int) -> list[Prompt]:
    """Prompts of ten blocks in turn."""
    blocks = [list(range(10 * number + 1, 10 * number + 11)) for number in range(num_prompts)]
    return [Prompt(21, blocks[number % num_prompts]) for number in range(rounds * num_prompts)]


def phases() -> list[list[Prompt]]:
    """A loop of 120 blocks, then one of 50."""
    return [loop(12, 40), [Prompt(21, [block + 1000 for block in prompt.block_ids]) for prompt in loop(5, 40)]]


LOOP = Recipe("loop", Kind.MADE, lambda: [loop(12, 100)])
PHASES = Recipe("phases", Kind.CHANGE, phases)


# -- loads ------------------------------------------------------------------------------------------------------------


def test_the_loads_of_the_checkout_are_those_that_the_docs_count() -> None:
    recipes = choose_recipes(TRACES, "*")
    names = [recipe.name for recipe in recipes]
    assert (len(names), len(set(names))) == (99, 99)
    assert names[0] == "mooncake_conversation", "large blocks first"
    assert sum(recipe.is_held_out for recipe in recipes) == 32
    assert Counter(recipe.kind for recipe in recipes) == {
        Kind.WHOLE: 4, Kind.PART: 16, Kind.SHUFFLED: 4, Kind.AFTER: 12, Kind.BESIDE: 5, Kind.MADE: 34, Kind.CHANGE: 24,
    }  # fmt: skip


def test_a_load_is_the_same_each_time_and_says_where_its_second_phase_begins() -> None:
    (recipe,) = made("loop of 300, then lab chat")
    load = recipe.load()
    assert load == recipe.load()
    assert load.change == 1250
    first, second = (
        {block for each in part for block in each.block_ids} for part in (load.prompts[:1250], load.prompts[1250:])
    )
    assert not first & second
    assert load.capacities()[:2] == [300, 600], "from the longest tenth of the prompts on"


def test_fewer_traces_make_fewer_loads(tmp_path: Path) -> None:
    for name in ("one_a.jsonl", "one_b.jsonl.gz"):
        write_trace(tmp_path / name, [[1, 2], [1, 2, 3]])
    (tmp_path / "table.csv").write_text("no trace with blocks")
    names = [recipe.name for recipe in choose_recipes(tmp_path, "one*")]
    assert names[0] == "one_a"
    assert names[12:] == ["one_a then one_b", "one_b then one_a", "one_a beside one_b", "one_a and one_b, by quarters"]


def write_trace(path: Path, prompts: list[list[int]]) -> None:
    records = [
        {"timestamp": number, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for number, ids in enumerate(prompts)
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


# -- judged -----------------------------------------------------------------------------------------------------------


def test_lru_is_as_good_as_lru_with_any_hashes() -> None:
    pairs = judge([LOOP, *made("zipf, seed 1")], "lru", Path(), num_hashes=2)
    assert {ratio for pair in pairs for ratio in pair.hits.ratios} == {1.0}
    assert [pair.capacity for pair in pairs[:2]] == [60, 150]
    assert [pair.hits.lru for pair in pairs[:2]] == [0, 11_880], "all of the loop but its first round, where it fits"
    assert pairs[0].hits.num_blocks == 12_000


def test_hashes_make_a_difference_to_a_policy_that_samples_by_them() -> None:
    (pair,) = [pair for pair in judge([LOOP], "lineage", Path(), num_hashes=3) if pair.capacity == 60]
    assert len(set(pair.hits.own)) > 1
    assert pair.hits.lru == 0 < max(pair.hits.own)
    assert max(pair.hits.ratios) == 2.0


def test_processes_judge_as_one_does() -> None:
    recipes = [*made("loop of 12, seed *"), *made("recent, seed 2")]
    ended: list[int] = []
    alone = judge(recipes, "lineage", Path(), num_hashes=1, on_end=lambda: ended.append(1))
    assert judge(recipes, "lineage", Path(), num_hashes=1, jobs=2, on_end=lambda: ended.append(2)) == alone
    assert ended == [1, 1, 1, 2, 2, 2]


def test_a_policy_of_a_file_is_judged(tmp_path: Path) -> None:
    (tmp_path / "newest.py").write_text(NEWEST_FIRST)
    (pair, fits) = judge([LOOP], "newest.py:Newest", tmp_path, num_hashes=1)
    assert pair.hits.lru == 0 < pair.hits.own[0], "it keeps what was first of a loop"
    assert fits.hits.own[0] == fits.hits.lru


def test_a_replay_finds_what_the_rules_say() -> None:
    replay = Replay(8, block_size=2, policy="lru")
    assert [replay.serve(Prompt(7, [1, 2, 3])) for _ in range(2)] == [0, 3]
    assert replay.serve(Prompt(6, [1, 2, 3])) == 2, "the last token is computed"
    assert replay.serve(Prompt(7, [1, 2, 9])) == 2
    assert replay.serve(Prompt(23, list(range(20, 31)))) == 0, "of a longer prompt the first blocks"
    assert replay.serve(Prompt(23, list(range(20, 31)))) == 8


# -- summaries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "lru", "ratio"), [(3, 4, 0.75), (9, 4, 2.0), (0, 0, 1.0), (1, 0, 2.0), (0, 4, 0.0)])
def test_a_ratio_is_at_most_two(own: int, lru: int, ratio: float) -> None:
    assert Hits(10, lru, (own,)).ratios == [ratio]


def test_a_summary_has_the_lowest_mean_and_the_lowest_of_any_hashes() -> None:
    hits = [Hits(100, 10, (10, 8)), Hits(100, 10, (4, 16)), Hits(100, 10, (12, 12))]
    assert Summary.of("x", hits) == Summary("x", 3, pytest.approx((0.9 + 1.0 + 1.2) / 3), 0.9, 0.4)
    pairs = [Pair(f"load {hits.own}", kind, False, 60, hits) for kind, hits in zip(Kind, hits, strict=False)]
    assert [(each.title, each.num_pairs) for each in by_kind(pairs)] == [
        ("whole traces", 1), ("parts of traces", 1), ("sessions shuffled", 1), ("all", 3),
    ]  # fmt: skip
    assert worst(pairs, 1) == [pairs[0]]


def test_a_turnover_is_a_run_of_prompts_with_as_many_blocks_as_the_pool() -> None:
    sizes = [9, 9, 5, 5, 6, 4, 3, 20, 1]
    assert turnovers_of(sizes, 2, 10) == [slice(2, 4), slice(4, 6), slice(6, 8)]
    assert turnovers_of(sizes, 2, 100) == []


def test_what_fits_after_a_change_of_phase_is_told_apart() -> None:
    pairs = judge([PHASES], "lru", Path(), num_hashes=1)
    assert [pair.capacity for pair in pairs] == [60, 150]
    assert [(each.num_blocks, each.lru) for each in pairs[0].turnovers] == [(60, 10), (60, 60), (60, 60), (60, 60)]
    small = Pair("small", Kind.CHANGE, False, 60, pairs[0].hits, (Hits(60, 3, (3,)),) * 2)
    assert [(each.title, each.num_pairs) for each in after_changes([*pairs, small])] == [
        ("turnover 2", 3), ("turnover 2, where LRU finds half", 2),
        ("turnover 3", 2), ("turnover 3, where LRU finds half", 2),
        ("turnover 4", 2), ("turnover 4, where LRU finds half", 2),
    ]  # fmt: skip


# -- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Result:
    return CliRunner().invoke(commands.main, ["eviction", *arguments])


def test_the_command_prints_tables_and_writes_rows_and_a_picture(tmp_path: Path) -> None:
    ran = command("--loads", "loop of 1*", "--hashes", "2", "--output", str(tmp_path / "out"))
    assert ran.exit_code == 0, ran.output
    for text in ("loads that are not held out", "worst pairs", "loop of 12, seed 1, in 60 blocks", "2 pairs"):
        assert text in ran.output
    written = json.loads((tmp_path / "out" / "eviction_loads.json").read_text())
    assert [(row["load"], row["capacity"], len(row["own"])) for row in written["pairs"]] == [
        ("loop of 12, seed 1", 60, 2), ("loop of 12, seed 2", 60, 2),
    ]  # fmt: skip
    assert written["all"][-1]["num_pairs"] == 2
    assert (tmp_path / "out" / "eviction_loads.svg").read_text().startswith("<svg")


def test_without_traces_only_made_loads_are_run_and_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_CHECKOUT_TRACES", tmp_path / "none")
    ran = command("--loads", "loop of 12, seed 1", "--hashes", "1")
    assert ran.exit_code == 0
    assert "only the made loads are run" in ran.stderr
    assert "--loads is 'moon*': must be the name of a load" in command("--loads", "moon*").stderr


def test_wrong_input_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "table.jsonl").write_text("t_ms,input_tokens,output_tokens\n1,2,3\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.py").write_text(NEWEST_FIRST.replace("[-count:]", "[:count - 1]"))
    (tmp_path / "failing.py").write_text(NEWEST_FIRST.replace("pass", "raise KeyError(1)"))
    one = ("--loads", "loop of 12, seed 1", "--hashes", "1")
    for arguments, said in [
        (("--policy", "fifo"), "--policy is 'fifo': must be \"FILE.py:CLASS\", or one of lineage, lru"),
        (("--policy", f"{tmp_path}/mine.py:Newest", *one), "mine.py:19: evict("),
        (("--policy", f"{tmp_path}/failing.py:Newest", *one), "failing.py:7: the policy failed: KeyError(1)"),
        (
            ("--traces", str(tmp_path)),
            "table.jsonl: a record can't be read: ValueError('expected hash_ids or block_runs",
        ),
        (("--traces", str(tmp_path / "empty")), f"--traces is '{tmp_path}/empty': must be a folder with files *.jsonl"),
        (("--hashes", "0"), "'--hashes': 0 is not in the range 1<=x<=100"),
    ]:
        ran = command(*arguments)
        assert ran.exit_code != 0
        assert said in ran.stderr.replace("\n", " "), ran.stderr
