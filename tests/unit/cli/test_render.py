"""The drawing of a pool: it fits, its counts are right, and no model output controls the terminal."""

import io
import re

import pytest
from rich.console import Console, Group, RenderableType

from quire.cache.v1 import attach_pb2
from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.administer import explanation
from quire.cli.demo import DemoRun, SampleGrid, report
from quire.cli.generate import SampleTexts
from quire.cli.render import (
    LOOKS,
    BlockKind,
    BlockMap,
    StatsScreen,
    format_bytes,
    format_ratio,
    kind_of,
    kinds_of,
    memory_table,
    pool_view,
    printable,
    text_tail,
)
from quire.cli.snapshot import Snapshot, as_dict
from quire.client.engine.outputs import Chunk
from quire.client.engine.scheduling.sequence import FinishReason

FREE, CACHED, RETIRED, ACTIVE, SHARED = BlockKind
WIDTHS = [20, 40, 80, 200]


def draw(renderable: RenderableType, *, width: int = 80, encoding: str = "utf-8", height: int = 25) -> str:
    """The text a terminal of this width gets, without colours."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    console = Console(file=file, width=width, height=height, color_system=None, highlight=False, legacy_windows=False)
    console.print(renderable)
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def block(block_id: int, state: pb.BlockState.ValueType, reference_count: int = 0) -> pb.Block:
    return pb.Block(block_id=block_id, state=state, reference_count=reference_count)


def snapshot(blocks: list[pb.Block] | None = None, *, num_blocks: int = 8) -> Snapshot:
    """Two sequences of 20 tokens that share a full block of 16, of a model with room for 100."""
    counts = pb.BlockCounts(free_count=num_blocks - 4, cached_count=1, active_count=3)
    geometry = attach_pb2.PoolGeometry(
        block_size_tokens=16, block_count=num_blocks + 1, block_bytes=1024, max_sequence_tokens=100, model="tiny"
    )
    statistics = pb.PoolStatistics(
        pool="default",
        block_counts=counts,
        sequence_count=2,
        held_token_count=24,
        table_entry_count=4,
        shared_block_count=1,
        admitted_token_count=40,
        cached_token_count=10,
        fork_count=3,
        copied_block_count=1,
        refusal_counts={"OUT_OF_BLOCKS": 7},
    )
    pool = pb.Pool(name="default", attached=True, geometry=geometry, worker_address="unix:/run/quire/worker.sock")
    sequences = [pb.Sequence(sequence_id=i, token_count=20, block_count=2) for i in range(2)]
    return Snapshot(pool, statistics, sequences, blocks or [], True)


# The map.


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 7, 128, 5000])
def test_a_map_fits_and_counts_every_block(width: int, count: int) -> None:
    kinds = [BlockKind(i % len(BlockKind)) for i in range(count)]
    drawn = draw(BlockMap(kinds), width=width)
    assert all(len(line) <= width for line in drawn.splitlines())
    for kind, look in LOOKS.items():
        assert f"{kinds.count(kind):,} {look.label}" in drawn


def test_a_map_shows_blocks_in_order() -> None:
    drawn = draw(BlockMap([SHARED, ACTIVE, RETIRED, CACHED, FREE]), width=40)
    assert drawn.splitlines()[0] == "1 █ █ ▓ ▒ ·"


def test_rows_begin_with_their_first_block() -> None:
    lines = draw(BlockMap([FREE] * 40), width=40).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["1", "17", "33"]


def cells_of(drawn: str) -> str:
    return "".join(re.sub(r"^ *\d+ ", "", line) for line in drawn.splitlines() if re.match(r"^ *\d+ [▁-█·.@#xo]", line))


def test_a_big_pool_has_several_blocks_in_a_cell() -> None:
    drawn = draw(BlockMap([ACTIVE] * 4096 + [FREE] * 4096), width=40)
    assert "A cell is 16 blocks" in drawn
    assert cells_of(drawn) == "█" * 256 + "·" * 256


@pytest.mark.parametrize(("encoding", "used", "few"), [("utf-8", "█", "▁"), ("ascii", "@", "@")])
def test_a_few_used_blocks_of_a_large_pool_are_seen(encoding: str, used: str, few: str) -> None:
    kinds = bytearray(1_000_000)
    kinds[:4096] = bytes([ACTIVE]) * 4096
    kinds[500_000] = ACTIVE
    cells = cells_of(draw(BlockMap(kinds), width=80, encoding=encoding))
    assert cells.startswith(used * 4)
    assert cells[4:].replace("·", ".").strip(".") == few


@pytest.mark.parametrize(("num_used", "glyph"), [(1, "▁"), (8, "▄"), (16, "█")])
def test_the_height_of_a_cell_is_the_part_that_is_not_free(num_used: int, glyph: str) -> None:
    kinds = [*[CACHED] * num_used, *[FREE] * (8192 - num_used)]
    assert cells_of(draw(BlockMap(kinds), width=40))[0] == glyph


def test_the_colour_of_a_cell_is_of_most_that_are_not_free() -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system="standard", highlight=False)
    console.print(BlockMap([CACHED] * 2 + [ACTIVE] * 3 + [FREE] * 8187))
    first = console.file.getvalue().splitlines()[0]  # type: ignore[attr-defined]
    assert "\x1b[32m▃" in first, "green, as held"


def test_a_terminal_with_ascii_only_gets_ascii() -> None:
    drawn = draw(BlockMap([SHARED, ACTIVE, RETIRED, CACHED, FREE]), width=40, encoding="ascii")
    assert drawn.splitlines()[0] == "1 # @ x o ."


def test_kinds_look_different_without_colour_but_for_held_and_shared() -> None:
    assert len({look.glyph for look in LOOKS.values()}) == len(LOOKS) - 1
    assert len({look.ascii_glyph for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.style for look in LOOKS.values()}) == len(LOOKS)


@pytest.mark.parametrize(
    ("state", "reference_count", "kind"),
    [
        (pb.BLOCK_STATE_FREE, 0, FREE),
        (pb.BLOCK_STATE_CACHED, 0, CACHED),
        (pb.BLOCK_STATE_RETIRED, 0, RETIRED),
        (pb.BLOCK_STATE_ACTIVE, 1, ACTIVE),
        (pb.BLOCK_STATE_ACTIVE, 2, SHARED),
    ],
)
def test_kind_of_a_block(state: pb.BlockState.ValueType, reference_count: int, kind: BlockKind) -> None:
    assert kind_of(block(1, state, reference_count)) is kind


def test_blocks_that_were_not_listed_are_drawn_from_their_counts() -> None:
    assert list(kinds_of(snapshot())) == [SHARED, ACTIVE, ACTIVE, CACHED, FREE, FREE, FREE, FREE]
    assert list(kinds_of(snapshot([block(1, pb.BLOCK_STATE_FREE)]))) == [FREE]
    assert "in order of state" in draw(pool_view(snapshot()))
    assert "in order of state" not in draw(pool_view(snapshot([block(1, pb.BLOCK_STATE_FREE)])))


# Numbers.


def test_memory_beside_contiguous_buffers() -> None:
    drawn = draw(memory_table(snapshot()), width=120)
    (quire,) = [line for line in drawn.splitlines() if "Quire" in line]
    (contiguous,) = [line for line in drawn.splitlines() if "contiguous" in line]
    assert re.search(r"3 blocks of 16 tokens +24 +48 +50.0 % +3.0 KiB", quire)
    assert re.search(r"2 buffers of the longest length, 100 +40 +200 +20.0 % +12.5 KiB", contiguous)


def test_ratios_of_a_pool() -> None:
    seen = snapshot()
    assert seen.used_slots_ratio == 24 / 48
    assert seen.hit_ratio == 10 / 40
    empty = Snapshot(seen.pool, pb.PoolStatistics(), [], [], True)
    assert empty.used_slots_ratio is None
    assert empty.hit_ratio is None


def windowed_snapshot() -> Snapshot:
    """The same pool, of a model with 6 layers in 3 groups."""
    small = snapshot()
    small.pool.geometry.layer_groups.extend(
        [
            attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_FULL, layer_count=2),
            attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_SLIDING, window_token_count=1024, layer_count=2),
            attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_CHUNKED, window_token_count=1, layer_count=2),
        ]
    )
    small.statistics.layer_groups.extend(
        pb.LayerGroupStatistics(
            active_block_count=1000 + index,
            findable_block_count=20 + index,
            found_block_count=30 + index,
            passed_block_count=40 + index,
            evicted_block_count=50 + index,
        )
        for index in range(3)
    )
    return small


def test_layer_groups_have_a_line_each() -> None:
    text = draw(pool_view(windowed_snapshot()))
    assert re.search(r"^ +0 +full +2 +1,000 +20 +30 +40 +50$", text, re.MULTILINE)
    assert re.search(r"^ +1 +sliding, 1,024 tokens +2 +1,001 +21 +31 +41 +51$", text, re.MULTILINE)
    assert re.search(r"^ +2 +chunked, 1 token +2 +1,002 +22 +32 +42 +52$", text, re.MULTILINE)
    assert "Layer groups" not in draw(pool_view(snapshot()))


def test_a_miss_names_its_layer_group() -> None:
    answer = pb.ExplainPrefixResponse(
        pool="default",
        block_count=9,
        missing_block_index=3,
        missing_prefix_hash=bytes(32),
        missing_layer_group=1,
        reason=pb.MISS_REASON_EVICTED,
    )
    text = draw(explanation(answer, windowed_snapshot().pool.geometry), width=120)
    assert re.search(r"^missing in layer group +1 \(sliding, 1,024 tokens\) *$", text, re.MULTILINE)
    text = draw(explanation(answer, snapshot().pool.geometry), width=120)
    assert "layer group" not in text
    found = pb.ExplainPrefixResponse(pool="default", block_count=9, reason=pb.MISS_REASON_NONE)
    assert "layer group" not in draw(explanation(found, windowed_snapshot().pool.geometry), width=120)


def test_an_explanation_names_the_part_in_host_memory() -> None:
    parts = [
        pb.MediumTokens(medium=pb.MEDIUM_DEVICE, token_count=16),
        pb.MediumTokens(medium=pb.MEDIUM_HOST, token_count=32),
    ]
    answer = pb.ExplainPrefixResponse(pool="p", cached_token_count=48, tokens_by_medium=parts)
    lines = draw(explanation(answer, snapshot().pool.geometry), width=120).splitlines()
    assert [line.split() for line in lines if "host" in line] == [["of", "these", "in", "host", "memory", "32"]]


def test_a_token_has_bytes_in_each_layer_group() -> None:
    assert (snapshot().bytes_per_slot, snapshot().bytes_per_token) == (64, 64)
    windowed = windowed_snapshot()
    assert (windowed.bytes_per_slot, windowed.bytes_per_token) == (64, 3 * 64)
    text = draw(memory_table(windowed), width=120)
    assert f"{format_bytes(48 * 64)}" in text
    assert f"{format_bytes(200 * 3 * 64)}" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_statistics_fit(width: int) -> None:
    drawn = draw(pool_view(snapshot()), width=width)
    assert all(len(line) <= width for line in drawn.splitlines())


def test_statistics_say_what_there_is() -> None:
    drawn = draw(pool_view(snapshot()), width=120)
    for text in ("8 blocks of 16 tokens", "attached", "hit ratio", "25.0 %", "OUT_OF_BLOCKS", "unix:/run/quire/worker"):
        assert text in drawn


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (40, 10), (80, 3), (80, 1)])
@pytest.mark.parametrize("num_pools", [1, 2, 5])
@pytest.mark.parametrize(
    "trouble", ["", "no answer for 3 s (Connection refused), trying again: unix:/run/quire/c.sock"]
)
def test_watched_statistics_fit_the_terminal(size: tuple[int, int], num_pools: int, trouble: str) -> None:
    width, height = size
    pools = [snapshot(num_blocks=2_000)] * num_pools
    lines = draw(StatsScreen(pools, height=height, trouble=trouble), width=width, height=height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    if height == 24 and num_pools == 1:
        assert lines[-1].startswith("╰"), "the map is there to its end"
        assert len([line for line in lines if re.match(r"│ +\d+ ", line)]) >= 2
    if num_pools == 5 and height < 60:
        assert "lines more" in lines[-1]
    assert trouble[:20] in lines[0] or height == 1


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**40 * 5000, "5,000.0 TiB")],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_ratio_text() -> None:
    assert format_ratio(0.7654) == "76.5 %"
    assert format_ratio(None) == "–"


def test_a_message_for_json() -> None:
    found = as_dict(pb.ListBlocksResponse(blocks=[pb.Block(block_id=1, prefix_hash=b"\x01\xff")]))
    (block,) = found["blocks"]
    assert (block["block_id"], block["state"], block["reference_count"], block["prefix_hash"]) == (1, 0, 0, "01ff")
    assert as_dict(pb.PoolStatistics(refusal_counts={"B": 2, "A": 1}))["refusal_counts"] == {"A": 1, "B": 2}
    assert as_dict(pb.PoolStatistics(epoch=2**62))["epoch"] == 2**62


# Text.


@pytest.mark.parametrize("text", ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "a\rb", "\x00"])
def test_a_model_cannot_command_the_terminal(text: str) -> None:
    shown = printable(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert len(shown) == len(text)


def test_text_is_left_as_it_is() -> None:
    assert printable("Grüße,\n\tдрузья 你好") == "Grüße,\n\tдрузья 你好"


def test_the_tail_of_a_text() -> None:
    assert text_tail("one two three four", width=9, num_lines=2) == "three\nfour"
    assert text_tail("one two", width=20, num_lines=2) == "one two"
    assert text_tail("one", width=20, num_lines=0) == ""
    assert text_tail("", width=20, num_lines=3) == ""
    assert text_tail("a" * 25, width=10, num_lines=5) == "a" * 10 + "\n" + "a" * 10 + "\n" + "a" * 5


def test_brackets_are_no_markup() -> None:
    grid = SampleGrid(["[bold]prompt[/bold]"], 1, 10)
    grid.add(0, Chunk(0, "[red]text[/nothing]", (1,)))
    drawn = draw(grid)
    assert "[bold]prompt[/bold]" in drawn
    assert "[red]text[/nothing]" in drawn


# Samples of `quire generate`.


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 12), (80, 6)])
@pytest.mark.parametrize("count", [2, 3, 8, 24])
def test_growing_samples_can_be_erased(width: int, height: int, count: int) -> None:
    """A live drawing is erased line by line, as far as it is on the screen: it needs a line for the cursor.

    The terminal writes "^C" where the cursor is. In a line that is full this would begin another one.
    """
    texts = SampleTexts(count)
    for index in range(count):
        texts.add(Chunk(index, "some words " * 200, (1,)))
    lines = draw(texts, width=width, height=height).splitlines()
    assert len(lines) <= max(4, height - 1)
    assert len(lines[-1].strip()) < width - 2
    assert f"1 of {count}" in lines[0]


def test_every_growing_sample_can_be_shown_whole() -> None:
    texts = SampleTexts(3)
    texts.add(Chunk(0, "one " * 400, (1,), None, FinishReason.STOP))
    texts.add(Chunk(2, "three " * 400, (1,)))
    drawn = draw(Group(*texts.whole()))
    assert re.findall(r"(\d of 3 · [a-z ]+) ─", drawn) == ["1 of 3 · stop", "3 of 3 · not finished"]
    assert (drawn.count("one"), drawn.count("three")) == (400, 400)


# The demo.


def grown_grid(num_prompts: int = 8, num_samples: int = 2) -> SampleGrid:
    grid = SampleGrid([f"prompt {i}" for i in range(num_prompts)], num_samples, 4)
    for prompt in range(num_prompts):
        for sample in range(num_samples):
            reason = FinishReason.STOP if prompt == 0 else None
            grid.add(prompt, Chunk(sample, f"some words {sample} " * (5 * prompt + 1), (1, 2), None, reason))
    return grid


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (120, 30), (40, 70)])
def test_what_grows_fits_the_terminal(width: int, height: int) -> None:
    lines = draw(grown_grid(), width=width, height=height).splitlines()
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert "2 of 16 samples done, 32 tokens" in lines[0]


@pytest.mark.parametrize("num_prompts", [1, 3, 8])
def test_every_text_is_shown_whole_at_the_end(num_prompts: int) -> None:
    grid = grown_grid(num_prompts, 3)
    words = re.sub(r"[^a-z0-9 ]", " ", draw(grid.whole(80))).split()
    assert words.count("some") == sum(len(sample.text.split()) // 3 for sample in grid.all)


@pytest.mark.parametrize("width", [80, 200])
def test_the_report_fits_and_says_what_the_services_said(width: int) -> None:
    seen = snapshot()
    audit = pb.AuditPoolResponse(block_count=8)
    drawn = draw(report(DemoRun(seen, seen, audit, 2.0), grown_grid()), width=width)
    assert all(len(line) <= width for line in drawn.splitlines())
    for text in ("10 (25.0 %)", "1 (4 table entries in 3 blocks)", "32 in 2.0 s, 16 per second", "no violation"):
        assert text in drawn


def test_the_report_shows_a_violation() -> None:
    seen = snapshot()
    audit = pb.AuditPoolResponse(violations=["block 3 has two owners"], block_count=8)
    assert "1 violation: block 3 has two owners" in draw(report(DemoRun(seen, seen, audit, 1.0), grown_grid()))
