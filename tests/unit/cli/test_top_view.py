"""The screen of `quire top`: it fits any terminal, its counts are right, and colours only repeat its text."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
from typing import Any

import pytest
from rich.console import Console

from quire.cache.v1 import attach_pb2
from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.top_model import BlockBook, Look, Place, Rates, Tab
from quire.cli.top_view import Shown, TopScreen, list_height

SIZES = [(80, 24), (200, 50), (150, 20), (60, 12), (20, 5), (400, 100), (80, 1)]
NOW_S = 1_000.0


def draw(shown: Shown, *, width: int = 80, height: int | None = 24, encoding: str = "utf-8") -> list[str]:
    """The lines a terminal of this size gets, without colours."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    console = Console(file=file, width=width, height=height, color_system=None, highlight=False, legacy_windows=False)
    console.print(TopScreen(shown, height=height))
    text: str = file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    return text.splitlines()


def page(**more: Any) -> Look:
    """A pool of 96 blocks: 20 active, 5 of them shared, 30 cached, 2 retired; 2 leases and 30 sequences."""
    geometry = attach_pb2.PoolGeometry(block_count=97, block_size_tokens=16, block_bytes=1024, model="tiny")
    counts = pb.BlockCounts(free_count=44, cached_count=30, active_count=20, retired_count=2)
    statistics = pb.PoolStatistics(
        block_counts=counts,
        shared_block_count=5,
        lease_count=2,
        sequence_count=30,
        held_token_count=240,
        admitted_token_count=1000,
        cached_token_count=250,
        failed_step_count=3,
        step_in_flight_count=3,
        fencing_lease_count=1,
        refusal_counts={"OUT_OF_BLOCKS": 4, "QUOTA_EXCEEDED": 5},
    )
    leases = (
        pb.Lease(lease_id_prefix="aaaa1111", tenant="alice", state=pb.LEASE_STATE_OPEN, step_in_flight_count=2),
        pb.Lease(lease_id_prefix="bbbb2222", tenant="bob", state=pb.LEASE_STATE_FENCING, step_in_flight_count=1),
    )
    leases[0].expire_time.FromSeconds(int(NOW_S) + 17)
    sequences = tuple(
        pb.Sequence(
            lease_id_prefix="aaaa1111",
            sequence_id=100 + i,
            token_count=40,
            computed_token_count=20,
            scheduled_token_count=39,
            cached_token_count=16,
            block_count=3,
        )
        for i in range(30)
    )
    look = Look(
        at_s=0.0,
        pools=(pb.Pool(name="main", attached=True, geometry=geometry, block_counts=counts),),
        statistics={"main": statistics},
        pool="main",
        leases=leases,
        sequences=sequences,
        tenants=(pb.Tenant(name="alice", held_block_count=20, quota_block_count=48, limit_block_count=96),),
    )
    return dataclasses.replace(look, **more)


def book(num_blocks: int = 96) -> BlockBook:
    """The first 5 blocks shared, 15 held, 2 retired, 30 cached."""
    states = [pb.BLOCK_STATE_ACTIVE] * 20 + [pb.BLOCK_STATE_RETIRED] * 2 + [pb.BLOCK_STATE_CACHED] * 30
    blocks = [
        pb.Block(block_id=i + 1, state=state, reference_count=2 if i < 5 else 1, priority=5, tenant="alice")
        for i, state in enumerate(states)
    ]
    told = BlockBook(num_blocks)
    told.apply(pb.WatchBlocksResponse(events=[pb.BlockEvent(block=block) for block in blocks], cursor="c"))
    return told


def shown(place: Place | None = None, **more: Any) -> Shown:
    made = Shown(
        address="unix:/run/quire/cachemgr.sock",
        look=page(),
        place=place or Place(),
        clock="12:00:00",
        now_s=NOW_S,
        rates=Rates(12.5, 100.0, 7.0, 0.5, (0.0, 5.0, 10.0), 45.0, 1_230.0),
        book=book(),
    )
    return dataclasses.replace(made, **more)


OPENED = pb.Sequence(
    lease_id_prefix="aaaa1111",
    sequence_id=101,
    token_count=40,
    computed_token_count=32,
    scheduled_token_count=39,
    cached_token_count=16,
    block_ids=[3, 7, 90],
    block_count=3,
)


def opened() -> Shown:
    return shown(Place(opened=("aaaa1111", 101)), look=page(sequence=OPENED))


# It fits.

FRAMES = {
    "sequences": shown(),
    "leases": shown(Place(tab=Tab.LEASES)),
    "tenants": shown(Place(tab=Tab.TENANTS)),
    "filter": shown(Place(filter="alice", typed="bo")),
    "help": shown(Place(shows_help=True)),
    "without a map": shown(Place(shows_map=False)),
    "opened": opened(),
    "ended": shown(Place(opened=("aaaa1111", 7))),
    "trouble": shown(trouble="no answer for 7 s (Connection refused), trying again: unix:/run/quire/cachemgr.sock"),
    "no pool": shown(look=Look(0.0), book=None),
    "pools": shown(look=page(pools=tuple(pb.Pool(name=f"p{i}") for i in range(9)), pool="p7")),
    "big": shown(book=book(3_000_000)),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_has_the_size_of_its_terminal(name: str) -> None:
    for (width, height), encoding in itertools.product(SIZES, ("utf-8", "ascii")):
        lines = draw(FRAMES[name], width=width, height=height, encoding=encoding)
        assert (len(lines), encoding) == (height, encoding)
        assert max(map(len, lines)) <= width


def test_without_a_height_every_row_is_there_and_no_keys() -> None:
    text = "\n".join(draw(shown(), height=None))
    assert all(f" {100 + i} " in text for i in range(30))
    assert "quit" not in text


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
def test_the_keys_are_named_in_the_last_line(size: tuple[int, int]) -> None:
    last = draw(shown(), width=size[0], height=size[1])[-1]
    assert all(name in last for name in ("q quit", "/ find", "enter open", "b map", "? help"))
    assert "p pool" not in last
    assert "p pool" in draw(FRAMES["pools"], width=size[0], height=size[1])[-1]


# It says what is so.


def test_the_numbers_of_a_pool() -> None:
    text = "\n".join(draw(shown()))
    for part in (
        "20 held, of these 5 shared",
        "30 cached",
        "2 retired",
        "44 free",
        "hits 50.0 % now, 25.0 % in all",
        "7 evicted/s",
        "45 generated/s   1,230 computed/s   100 admitted/s",
        "12.5/s",
        "3 in flight",
        "3 failed",
        "9 refused",
        "2 leases, 1 fencing",
        "30 sequences",
        "240 tokens, 75.0 % of their slots",
    ):
        assert part in text


def test_steps_in_flight_and_fenced_leases_are_of_all_leases() -> None:
    """The list has a page of them."""
    text = "\n".join(draw(shown(look=page(leases=()))))
    assert "3 in flight" in text
    assert "2 leases, 1 fencing" in text


def test_the_bar_has_the_states_shares() -> None:
    bar = draw(shown())[3].strip()
    counts = {glyph: len(list(cells)) for glyph, cells in itertools.groupby(bar)}
    assert len(bar) == 70
    assert counts["█"] == pytest.approx(70 * 20 / 96, abs=2)
    assert counts["▒"] == pytest.approx(70 * 30 / 96, abs=2)
    assert counts["▓"] >= 1


def test_a_state_of_few_blocks_is_in_the_bar_too() -> None:
    counts = pb.BlockCounts(free_count=9_998, cached_count=1, retired_count=1)
    look = page(statistics={"main": pb.PoolStatistics(block_counts=counts)})
    assert draw(shown(look=look))[3].strip() == "▓▒" + "·" * 68


def test_the_steps_line_ends_in_their_speeds() -> None:
    assert draw(shown())[6].endswith("▁▅█")


def test_a_map_of_few_blocks_shows_each() -> None:
    cells = "".join(re.findall(r"[█▓▒·]", "".join(draw(shown(), width=200, height=50)[10:21])))
    assert cells == "█" * 20 + "▓" * 2 + "▒" * 30 + "·" * 44


def test_a_map_of_many_blocks_shows_how_full_their_cells_are() -> None:
    lines = draw(shown(book=book(100_000)), width=80, height=24)
    (legend,) = [line for line in lines if " a cell: " in line]
    per_cell = int(re.findall(r"a cell: ([\d,]+) blocks", legend)[0].replace(",", ""))
    rows = [re.sub(r"^ *\d+ ", "", line) for line in lines if re.match(r"^ +\d+ [▁▂▃▄▅▆▇█·]+", line)]
    assert (len("".join(rows)) - 1) * per_cell < 100_000 <= len("".join(rows)) * per_cell
    assert rows[0].startswith("▁·" if per_cell > 416 else "▂·")


def test_blocks_are_counted_once_and_the_legend_counts_none() -> None:
    """The legend's blocks are of another moment than the numbers, so that two counts would differ."""
    lines = draw(shown(book=book(100_000)))
    (legend,) = [line for line in lines if " a cell: " in line]
    assert re.search("shared +█ held by one +█ retired +█ cached +· free", legend)
    assert not re.search(r"\d", legend.replace(re.findall(r"a cell: [\d,]+", legend)[0], ""))
    assert len([line for line in lines if "cached" in line and re.search(r"\d", line.partition("a cell")[0])]) == 1


def test_a_map_that_is_being_read_says_so() -> None:
    empty = BlockBook(96)
    assert any("being read" in line for line in draw(shown(book=empty)))
    assert not any("being read" in line for line in draw(shown()))


def test_a_list_shows_the_selected_row_wherever_it_is() -> None:
    place = Place(selected=("aaaa1111", 129))
    lines = draw(shown(place))
    assert any(" 129 " in line for line in lines)
    assert any(re.search(r"Sequences 30   rows \d+ to 30", line) for line in lines)
    assert not any(line.startswith(" aaaa1111") and " 100 " in line for line in lines)


def test_the_selected_row_is_reversed() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, height=24, force_terminal=True, color_system="standard", no_color=True)
    console.print(TopScreen(shown(Place(selected=("aaaa1111", 101))), height=24))
    (line,) = [line for line in file.getvalue().splitlines() if "\x1b[7m" in line]
    assert " 101 " in line


def test_a_sequence_in_the_list() -> None:
    (line,) = [line for line in draw(shown(), width=200, height=50) if " 103 " in line]
    assert re.search(r"aaaa1111 +alice +103 +40 +20 +39 +16 +3 +– +=======\.\.\.\.\.\.\.", line)


def test_leases_say_how_long_they_last() -> None:
    text = "\n".join(draw(shown(Place(tab=Tab.LEASES))))
    assert re.search(r"aaaa1111 +alice +open +17 s", text)
    assert re.search(r"bbbb2222 +bob +fencing +– ", text)


def test_wide_screens_show_all_lists() -> None:
    text = "\n".join(draw(shown(), width=200, height=50))
    assert all(title in text for title in ("Sequences 30", "Leases 2", "Tenants 1"))
    assert re.search(r"alice +20 +0 +– +– +– +– +48 +96", text)


def test_a_filter_and_what_it_leaves_are_shown() -> None:
    text = "\n".join(draw(shown(Place(filter="bob"))))
    assert "Sequences 0 of 30   filter: bob" in text
    assert " filter: bo_" in draw(FRAMES["filter"])[-1]


def test_a_page_that_is_not_all_says_so() -> None:
    assert any("Sequences 30 and more" in line for line in draw(shown(look=page(is_cut=frozenset({Tab.SEQUENCES})))))


def test_an_opened_sequence() -> None:
    lines = draw(opened(), width=100)
    text = "\n".join(lines)
    assert "Sequence 101 of lease aaaa1111, tenant alice" in text
    assert "40 known   32 computed   39 planned   16 found in the cache" in text
    assert re.search(r"^ +0 +0 to 15 +3 +shared +2 +5 +0  –", text, re.MULTILINE)
    assert re.search(r"^ +1 +16 to 31 +7 +held +1 +5 +0  –", text, re.MULTILINE)
    assert re.search(r"^ +2 +32 to 39 +90$", text, re.MULTILINE)
    (bar,) = [line for line in lines if line.startswith(" blocks") and "computed" in line]
    cells = re.sub(r" .*", "", bar[9:])
    assert len(cells) == 44
    assert [len(list(run)) for _, run in itertools.groupby(cells)] == pytest.approx(
        [44 / 3, 44 / 3, 44 * 7 / 48, 44 * 9 / 48], abs=2
    )


GROUPS = (
    attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_FULL, layer_count=2),
    attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_SLIDING, window_token_count=16, layer_count=2),
    attach_pb2.LayerGroup(kind=attach_pb2.LAYER_GROUP_KIND_SLIDING, window_token_count=16, layer_count=2),
)


def windowed(**more: Any) -> Look:
    """The same pool, of a model with a full and two sliding groups."""
    look = page(**more)
    look.pools[0].geometry.layer_groups.extend(GROUPS)
    numbers = ((12, 20), (4, 6), (4, 4))
    look.statistics["main"].layer_groups.extend(
        pb.LayerGroupStatistics(active_block_count=held, findable_block_count=findable) for held, findable in numbers
    )
    return look


def test_groups_that_see_the_same_are_added_up() -> None:
    lines = draw(shown(look=windowed()), width=120)
    assert " groups  full: 12 held, 20 findable   sliding, 16 tokens (2 groups): 8 held, 10 findable" in lines
    assert not any(line.startswith(" groups") for line in draw(shown()))


def test_an_opened_sequence_shows_the_table_of_each_group() -> None:
    told = pb.Sequence()
    told.CopyFrom(OPENED)
    told.block_ids[:] = [3, 7, 90, 8, 91, 92]
    told.block_count = 6
    told.group_block_tables.extend(
        pb.GroupBlockTable(passed_block_count=passed, block_count=count) for passed, count in ((0, 3), (1, 2), (2, 1))
    )
    place = Place(opened=("aaaa1111", 101))
    lines = draw(shown(place, look=windowed(sequence=told)), width=120)
    text = "\n".join(lines)
    assert " groups  0 full: 3   1 sliding, 16 tokens: 2, 1 passed   2 sliding, 16 tokens: 1, 2 passed" in lines
    rows = [line.split()[:6] for line in lines if re.match(r" +\d+ +\d+ +\d+ to", line)]
    assert [(row[0], row[1], row[2], row[5]) for row in rows] == [
        ("0", "0", "0", "3"),
        ("0", "1", "16", "7"),
        ("0", "2", "32", "90"),
        ("1", "1", "16", "8"),
        ("1", "2", "32", "91"),
        ("2", "2", "32", "92"),
    ]
    assert re.search(r"^ +1 +1 +16 to 31 +8 +held +1 +5 +0  –", text, re.MULTILINE)
    (bar,) = [line for line in lines if line.startswith(" blocks") and "computed" in line]
    assert re.sub(r" .*", "", bar[9:]).count("·") == pytest.approx(60 * 9 / 48, abs=2), "a table has 3 blocks"


def test_an_opened_sequence_is_scrolled() -> None:
    text = "\n".join(draw(dataclasses.replace(opened(), place=Place(opened=("aaaa1111", 101), offset=2))))
    assert "32 to 39" in text
    assert "0 to 15" not in text


def test_a_table_that_is_not_told_and_a_sequence_that_has_ended() -> None:
    bare = pb.Sequence(lease_id_prefix="aaaa1111", sequence_id=101, token_count=40, block_count=3)
    place = Place(opened=("aaaa1111", 101))
    assert any("3 blocks; cachemgr does not list them" in line for line in draw(shown(place, look=page(sequence=bare))))
    assert any("It has ended." in line for line in draw(shown(place)))


def test_of_many_pools_those_around_the_chosen_one_are_shown() -> None:
    lines = draw(FRAMES["pools"])
    assert [line for line in lines if "▸pool p7" in line]
    assert any("and 4 pools more" in line for line in lines)


def test_trouble_takes_the_first_line_and_the_last_look_stays() -> None:
    lines = draw(FRAMES["trouble"])
    assert lines[0].startswith(" no answer for 7 s (Connection refused), trying again")
    assert any("20 held" in line for line in lines)


def test_a_detached_pool_and_none() -> None:
    pool = page().pools[0]
    gone = pb.Pool(name=pool.name, geometry=pool.geometry, block_counts=pool.block_counts)
    assert "NOT ATTACHED" in draw(shown(look=page(pools=(gone,))))[1]
    assert any("no worker is attached" in line for line in draw(FRAMES["no pool"]))


def test_names_can_not_command_the_terminal() -> None:
    leases = (pb.Lease(lease_id_prefix="aaaa1111", tenant="\x1b[2Jevil"),)
    pools = (pb.Pool(name="main\x1b]0;x\x07", attached=True, geometry=page().pools[0].geometry),)
    for tab in Tab:
        tenants = (pb.Tenant(name="\x1b[2Jevil"),)
        look = page(leases=leases, pools=pools, pool=pools[0].name, tenants=tenants)
        place = Place(tab=tab, filter="\x1b[2Jevil")
        assert "\x1b" not in "".join(draw(shown(place, look=look), width=200, height=50))


def test_ascii_only_says_the_same() -> None:
    lines = draw(shown(), encoding="ascii")
    assert lines[3].strip().startswith("###@")
    assert lines[6].endswith(".+#") or lines[6].endswith(".=#")
    assert "20 held, of these 5 shared" in lines[2]


def test_a_page_key_moves_by_about_a_list() -> None:
    for width, height in SIZES:
        assert 1 <= list_height(shown(), width=width, height=height) <= height
