"""The state of `quire top` after answers and keys."""

from __future__ import annotations

import pytest

from quire.cache.v1 import attach_pb2
from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.top_model import Action, BlockBook, KeyDecoder, Look, Place, Rates, Tab, Trend, key_of
from quire.client.block_kinds import BlockKind

FREE, CACHED, ACTIVE = pb.BLOCK_STATE_FREE, pb.BLOCK_STATE_CACHED, pb.BLOCK_STATE_ACTIVE


def pool(name: str, num_blocks: int = 8) -> pb.Pool:
    return pb.Pool(name=name, geometry=attach_pb2.PoolGeometry(block_count=num_blocks + 1, block_size_tokens=4))


def look(*sequence_ids: int, pools: tuple[str, ...] = ("main",), pool_name: str = "main") -> Look:
    """Leases a1 of alice and b2 of bob; sequences by turns of the one and the other."""
    return Look(
        at_s=0.0,
        pools=tuple(pool(name) for name in pools),
        pool=pool_name,
        leases=(pb.Lease(lease_id_prefix="a1", tenant="alice"), pb.Lease(lease_id_prefix="b2", tenant="bob")),
        sequences=tuple(pb.Sequence(lease_id_prefix=("a1", "b2")[i % 2], sequence_id=i) for i in sequence_ids),
        tenants=(pb.Tenant(name="alice"), pb.Tenant(name="bob")),
    )


def press(place: Place, seen: Look, *keys: str) -> Action | None:
    """Several keys; the action of the last one."""
    return [place.press(key, seen, page=3) for key in keys][-1]


def selected(place: Place, seen: Look) -> int:
    rows = place.rows(seen)
    return key_of(rows[place.selected_index(rows)])[1]


# Rates.


def counted(epoch: int = 1, **counts: int) -> pb.PoolStatistics:
    return pb.PoolStatistics(epoch=epoch, **counts)


def test_rates_are_differences_by_time() -> None:
    trend = Trend()
    trend.add(10.0, counted(computed_step_count=5, admitted_token_count=100, cached_token_count=90))
    trend.add(
        12.0,
        counted(computed_step_count=25, admitted_token_count=300, cached_token_count=140, evicted_block_count=8),
    )
    assert trend.rates() == Rates(10.0, 100.0, 4.0, 0.25, (10.0,))


def test_tokens_per_second() -> None:
    trend = Trend()
    for second in range(20):
        seen = counted(generated_token_count=50 * second, computed_token_count=1_000 + 400 * max(0, second - 10))
        trend.add(float(second), seen)
    assert trend.rates().generated_tokens_per_s == 50.0
    assert trend.rates().computed_tokens_per_s == 400.0
    trend.add(24.0, counted(generated_token_count=1_000, computed_token_count=4_600))
    assert trend.rates().generated_tokens_per_s == 10.0, "smoothed over the last seconds"


def test_rates_forget_what_is_long_ago() -> None:
    trend = Trend()
    for second in range(20):
        trend.add(float(second), counted(computed_step_count=max(0, 100 * (second - 10))))
    assert trend.rates().steps_per_s == 100.0
    assert trend.rates().step_speeds[:10] == (0.0,) * 10


def test_looks_further_apart_than_the_window_still_give_a_rate() -> None:
    trend = Trend()
    trend.add(0.0, counted())
    trend.add(60.0, counted(computed_step_count=120))
    assert trend.rates().steps_per_s == 2.0


def test_no_prompt_is_no_hit_ratio() -> None:
    trend = Trend()
    trend.add(0.0, counted(admitted_token_count=10, cached_token_count=5))
    trend.add(1.0, counted(admitted_token_count=10, cached_token_count=5))
    assert trend.rates().hit_ratio is None


def test_a_new_epoch_begins_anew() -> None:
    trend = Trend()
    trend.add(0.0, counted(computed_step_count=1000))
    trend.add(1.0, counted(epoch=2, computed_step_count=3))
    assert trend.rates() == Rates()
    trend.add(2.0, counted(epoch=2, computed_step_count=7))
    assert trend.rates().steps_per_s == 4.0


# Blocks.


def answer(*blocks: pb.Block, cleared: bool = False, cursor: str = "") -> pb.WatchBlocksResponse:
    events = [pb.BlockEvent(block=block) for block in blocks]
    return pb.WatchBlocksResponse(cleared=cleared, events=events, cursor=cursor)


def block(block_id: int, state: pb.BlockState.ValueType, reference_count: int = 0) -> pb.Block:
    return pb.Block(block_id=block_id, state=state, reference_count=reference_count)


def test_a_book_is_what_it_was_told() -> None:
    book = BlockBook(4)
    book.apply(answer(block(1, ACTIVE, 2), block(4, CACHED), cleared=True))
    assert not book.is_whole
    book.apply(answer(block(2, ACTIVE, 1), cursor="c"))
    assert book.is_whole
    assert list(book.kinds) == [BlockKind.SHARED, BlockKind.ACTIVE, BlockKind.FREE, BlockKind.CACHED]
    book.apply(answer(pb.Block(block_id=1, state=FREE), block(4, ACTIVE, 1), cursor="d"))
    assert list(book.kinds) == [BlockKind.FREE, BlockKind.ACTIVE, BlockKind.FREE, BlockKind.ACTIVE]
    assert book.block(1) is None
    assert book.block(4) == block(4, ACTIVE, 1)


def test_a_cleared_book_is_empty_until_it_is_whole_again() -> None:
    book = BlockBook(2)
    book.apply(answer(block(1, ACTIVE, 1), cursor="c"))
    book.apply(answer(cleared=True))
    assert (list(book.kinds), book.block(1), book.is_whole) == ([0, 0], None, False)


def test_blocks_that_are_not_of_the_pool_are_passed_over() -> None:
    book = BlockBook(2)
    book.apply(answer(block(0, ACTIVE, 1), block(3, ACTIVE, 1), cursor="c"))
    assert list(book.kinds) == [0, 0]


def test_pages_tell_a_big_pool() -> None:
    book = BlockBook(3)
    book.apply_page([block(1, CACHED), block(2, FREE)], is_last=False)
    assert not book.is_whole
    book.apply_page([block(3, ACTIVE, 1)], is_last=True)
    assert book.is_whole
    assert list(book.kinds) == [BlockKind.CACHED, BlockKind.FREE, BlockKind.ACTIVE]


# Where the user is.


def test_the_selection_follows_its_row() -> None:
    place = Place()
    press(place, look(1, 2, 3, 4), "j", "down")
    assert selected(place, look(1, 2, 3, 4)) == 3
    assert selected(place, look(3, 4)) == 3
    assert selected(place, look(0, 1, 2, 3, 4)) == 3


def test_when_its_row_is_away_the_one_at_its_place_is_selected() -> None:
    place = Place()
    press(place, look(1, 2, 3, 4), "j", "j")
    assert selected(place, look(1, 2, 4, 5)) == 4
    assert selected(place, look(1)) == 1
    assert place.selected_index([]) == 0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("k", 0),
        ("jjk", 1),
        ("G", 9),
        (("G", "j"), 9),
        (("G", "g"), 0),
        (("page down", "page down", "page up"), 3),
        ((" ",), 3),
        (("end", "up"), 8),
    ],
)
def test_moving_ends_at_the_ends(keys: tuple[str, ...], expected: int) -> None:
    place, seen = Place(), look(*range(10))
    press(place, seen, *keys)
    assert selected(place, seen) == expected


def test_moving_in_an_empty_list_is_harmless() -> None:
    place = Place()
    assert press(place, look(), "j", "G", "enter") is None
    assert (place.selected, place.opened) == (None, None)


def test_quitting() -> None:
    assert press(Place(), look(), "q") is Action.QUIT
    assert press(Place(shows_help=True), look(), "q") is Action.QUIT


def test_the_next_pool_is_asked_for_and_after_the_last_the_first() -> None:
    place, names = Place(), ("east", "main", "west")
    place.opened, place.index = ("a1", 1), 5
    assert press(place, look(pools=names), "p") is Action.ASK
    assert (place.pool, place.opened, place.index) == ("west", None, 0)
    assert press(place, look(pools=names, pool_name="west"), "p") is Action.ASK
    assert place.pool == "east"


def test_of_one_pool_there_is_no_next() -> None:
    place = Place()
    assert press(place, look(), "p") is None
    assert place.pool == ""


def test_lists_come_in_turn() -> None:
    place = Place()
    tabs = [place.tab]
    for _ in range(3):
        press(place, look(1, 2), "j", "tab")
        tabs.append(place.tab)
        assert place.selected is None
    assert tabs == [Tab.SEQUENCES, Tab.LEASES, Tab.TENANTS, Tab.SEQUENCES]


@pytest.mark.parametrize(("typed", "expected"), [("ali", [2, 4]), ("B2", [1, 3]), ("x", []), ("", [1, 2, 3, 4])])
def test_a_filter_is_part_of_a_tenants_or_a_leases_name(typed: str, expected: list[int]) -> None:
    place, seen = Place(), look(1, 2, 3, 4)
    assert press(place, seen, "/", *typed, "enter") is Action.ASK
    assert [key_of(row)[1] for row in place.rows(seen)] == expected


def test_a_filter_is_for_every_list() -> None:
    place = Place(filter="bob")
    for place.tab, name in ((Tab.LEASES, "b2"), (Tab.TENANTS, "bob")):
        assert [key_of(row)[0] for row in place.rows(look())] == [name]


def test_keys_are_letters_while_a_filter_is_typed() -> None:
    place = Place()
    assert press(place, look(1), "/", "q", "b", "backspace", "p", "enter") is Action.ASK
    assert (place.filter, place.typed, place.shows_map) == ("qp", None, True)


def test_escape_leaves_the_typing_then_takes_the_filter_away() -> None:
    place = Place(filter="alice")
    assert press(place, look(), "/", "b", "escape") is None
    assert place.filter == "alice"
    assert press(place, look(), "escape") is Action.ASK
    assert place.filter == ""


def test_a_sequence_is_opened_scrolled_and_left() -> None:
    seen = look(1, 2)
    place = Place()
    assert press(place, seen, "j", "enter") is Action.ASK
    assert place.opened == ("a1", 2)
    inside = Look(0.0, sequence=pb.Sequence(block_count=5))
    press(place, inside, "j", "j", "j")
    assert place.offset == 3
    press(place, inside, "end", "j")
    assert place.offset == 4
    press(place, inside, "escape")
    assert place.opened is None
    assert place.selected_index(place.rows(seen)) == 1


@pytest.mark.parametrize(("tab", "name", "expected"), [(Tab.LEASES, "b2", [1, 3]), (Tab.TENANTS, "bob", [1, 3])])
def test_opening_a_lease_or_a_tenant_lists_its_sequences(tab: Tab, name: str, expected: list[int]) -> None:
    place, seen = Place(tab=tab), look(1, 2, 3, 4)
    press(place, seen, "j", "enter")
    assert (place.filter, place.tab) == (name, Tab.SEQUENCES)
    assert [key_of(row)[1] for row in place.rows(seen)] == expected


def test_map_and_help_are_turned_on_and_off() -> None:
    place = Place()
    press(place, look(), "b")
    assert not place.shows_map
    press(place, look(), "b", "?")
    assert place.shows_map
    assert place.shows_help
    press(place, look(1, 2), "j")
    assert not place.shows_help
    assert place.selected is None


# Keys.


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"qJ/?", ["q", "J", "/", "?"]),
        (b"\x1b[A\x1b[B\x1bOA\x1bOB", ["up", "down", "up", "down"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[F", ["page up", "page down", "home", "end"]),
        (b"\r\n\t\x7f\x08", ["enter", "enter", "tab", "backspace", "backspace"]),
        ("äé€".encode(), ["ä", "é", "€"]),
        (b"\x1b[1;5Cq", ["q"]),
        (b"\x1b[200~q", ["q"]),
        (b"\x01\x02q", ["q"]),
        (b"\xffq", ["q"]),
        (b"\x1bj", ["escape", "j"]),
    ],
)
def test_keys(data: bytes, keys: list[str]) -> None:
    decoder = KeyDecoder()
    assert [key for key in decoder.feed(data) if key != "\ufffd"] == keys or data[:1] == b"\xff"
    assert not decoder.is_open or data[:1] == b"\xff"


@pytest.mark.parametrize("data", [b"\x1b[A", b"\x1b[5~", b"\x1bOB", "ä".encode(), b"\x1b[1;5C"])
def test_a_key_may_come_in_pieces(data: bytes) -> None:
    whole, decoder = KeyDecoder().feed(data), KeyDecoder()
    pieces = [key for index in range(len(data)) for key in decoder.feed(data[index : index + 1])]
    assert pieces == whole
    assert not decoder.is_open


def test_escape_alone_is_a_key_once_nothing_follows() -> None:
    decoder = KeyDecoder()
    assert decoder.feed(b"\x1b") == []
    assert decoder.is_open
    assert decoder.flush() == ["escape"]
    assert decoder.flush() == []
    assert decoder.feed(b"q") == ["q"]
