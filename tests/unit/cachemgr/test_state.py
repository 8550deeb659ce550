"""The state directory: saved state is restored, and any other content is ignored."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cachemgr import state
from quire.cachemgr.catalog import MAX_TERM, AttachedPool, Catalog, Registration
from quire.cachemgr.geometry import Geometry
from quire.cachemgr.state import StateDirectory, StateUnusable

GEOMETRY = Geometry(
    block_size=2,
    num_blocks=9,
    block_bytes=64,
    max_sequences=4,
    max_sequence_tokens=16,
    vocab_size=10,
    model="m",
    model_fingerprint="f" * 64,
)
EPOCH, TERM = -(2**62), 5
KEY = bytes(range(32))


def begin(path: Path) -> Path:
    """A directory with the state of one pool, which has one lease; returns the pool's folder."""
    directory = StateDirectory(path)
    catalog = Catalog(TERM, verify=True, begin_state=directory.begin)
    pool = catalog.register(Registration("a", EPOCH, 0, 0, GEOMETRY, "unix:/run/w.sock"), signing_key=KEY)
    assert isinstance(pool, AttachedPool)
    catalog.open_lease(pool, "lease", ttl_s=10.0, now=0.0)
    directory.close()
    return path / f"a@{EPOCH}"


def restore(path: Path, term: int = TERM + 1) -> list[AttachedPool]:
    """The pools that the next cachemgr goes on with."""
    directory, catalog = StateDirectory(path), Catalog(term, verify=True)
    directory.restore(catalog, now=0.0)
    directory.close()
    return catalog.pools()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def folder(path: Path) -> Path:
    return begin(path)


def assert_not_used(path: Path, folder: Path, caplog: pytest.LogCaptureFixture, told: str) -> None:
    """The pool is not there, as if nothing had been kept; the log says why; a new epoch is kept again."""
    with caplog.at_level(logging.WARNING):
        assert restore(path) == []
    assert told in caplog.text
    assert not os.path.lexists(folder)
    assert begin(path) == folder
    assert len(restore(path)) == 1


# -- pool.json -----------------------------------------------------------------------------------------------------


def test_what_was_kept_is_there_again(path: Path, folder: Path) -> None:
    for restart in range(1, 4):
        (pool,) = restore(path, TERM + restart)
        assert (pool.ledger.pool, pool.ledger.epoch, pool.ledger.geometry) == ("a", EPOCH, GEOMETRY)
        assert (pool.signing_key, pool.worker_address) == (KEY, "unix:/run/w.sock")
        assert pool.terms == tuple(range(TERM, TERM + restart + 1))
        assert [lease.lease_id for lease in pool.ledger.inspector.leases()] == ["lease"]


def test_a_clock_that_was_set_back_gives_the_term_after_the_last(path: Path, folder: Path) -> None:
    assert [pool.terms for pool in restore(path, term=1)] == [(TERM, TERM + 1)]
    assert [pool.terms for pool in restore(path, term=1)] == [(TERM, TERM + 1, TERM + 2)]


def test_every_flipped_bit_is_found(folder: Path) -> None:
    whole = (folder / "pool.json").read_bytes()
    saved = state.decode_saved(state.unseal(whole))
    num_refused = 0
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        try:
            assert state.decode_saved(state.unseal(damaged)) == saved, place
        except ValueError:
            num_refused += 1
    assert num_refused > 0.99 * 8 * len(whole), "all but a few between the values"


@pytest.mark.parametrize("length", [0, 1, 2, 100, -1])
def test_what_is_torn_is_not_used(length: int, path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    about = folder / "pool.json"
    about.write_bytes(about.read_bytes()[:length])
    assert_not_used(path, folder, caplog, "state not used")


def put(*place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets a value of the content."""

    def change(content: dict[str, Any]) -> None:
        for name in place[:-1]:
            content = content[name]
        content[place[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put("version", value=2), "it is of version 2"),
        (put("version", value="3"), "it is of version 3"),
        (put("boot_id", value="another"), "rebooted since"),
        (put("terms", value=[]), "terms: must be rising numbers, 1 to 9223372036854775806, at least one"),
        (put("terms", value=5), "terms:"),
        (put("terms", value=None), "terms:"),
        (put("terms", value=[5, 5]), "terms:"),
        (put("terms", value=[0]), "terms:"),
        (put("terms", value=[True]), "terms:"),
        (put("terms", value=["5"]), "terms:"),
        (put("terms", value=[5.0]), "terms:"),
        (put("terms", value=[MAX_TERM]), "terms:"),
        (put("terms", value=[2**63]), "terms:"),
        (put("signing_key", value=""), "signing_key: must be 32 bytes"),
        (put("signing_key", value="00" * 31), "signing_key:"),
        (put("signing_key", value=7), "signing_key:"),
        (put("signing_key", value="x" * 64), "non-hexadecimal"),
        (put("registration", value=None), "registration:"),
        (put("registration", value=[]), "registration:"),
        (put("registration", "pool", value="b"), "it is another pool's"),
        (put("registration", "pool", value="../a"), "register_pool.pool"),
        (put("registration", "epoch", value=0), "register_pool.epoch"),
        (put("registration", "epoch", value=2**63), "registration:"),
        (put("registration", "worker_address", value=7), "registration:"),
        (put("registration", "worker_address", value="x" * 5_000), "register_pool.worker_address"),
        (put("registration", "geometry", value={}), "geometry.block_size_tokens"),
        (put("registration", "geometry", "model", value=7), "registration:"),
        (put("registration", "geometry", "block_count", value=2**31 - 1), "geometry.block_count"),
        (put("registration", "geometry", "block_count", value="many"), "registration:"),
        (put("registration", "geometry", "unknown", value=1), "registration:"),
    ],
)
def test_what_does_not_fit_is_not_used(
    change: Any, told: str, path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    about = folder / "pool.json"
    content = state.unseal(about.read_bytes())
    change(content)
    about.write_text(state.seal(content))
    assert_not_used(path, folder, caplog, told)


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"content": 7}', "[" * 100_000, json.dumps({"version": 2})])
def test_what_is_no_description_is_not_used(
    text: str, path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "pool.json").write_text(text)
    assert_not_used(path, folder, caplog, "state not used")


# -- what is no file -----------------------------------------------------------------------------------------------


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link(path: Path) -> None:
    kept = path.parent.parent.parent / "kept"
    path.rename(kept)
    path.symlink_to(kept)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("make", [make_fifo, make_link, make_folder])
@pytest.mark.parametrize("name", ["pool.json", "log-0"])
def test_what_is_no_regular_file_is_not_used(
    name: str, make: Callable[[Path], None], path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(folder / name)
    assert_not_used(path, folder, caplog, "state not used" if name == "pool.json" else "pool not recovered")


def test_a_link_in_place_of_a_folder_is_not_used(path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = path.parent / "kept"
    shutil.move(folder, kept)
    folder.symlink_to(kept)
    assert_not_used(path, folder, caplog, "it is a link")
    assert (kept / "pool.json").exists()


@pytest.mark.parametrize("make", [make_fifo, make_link, make_folder])
def test_what_lies_in_the_way_of_a_file_to_write_is_replaced(
    make: Callable[[Path], None], path: Path, folder: Path
) -> None:
    unfinished = folder / "pool.unfinished"
    unfinished.write_text("not ours")
    make(unfinished)
    assert len(restore(path)) == 1
    kept = path.parent / "kept"
    assert not kept.exists() or kept.read_text() == "not ours"


@pytest.mark.parametrize("make", [make_fifo, make_link, make_folder])
def test_a_lock_that_is_no_regular_file_is_told(make: Callable[[Path], None], path: Path, folder: Path) -> None:
    lock = path / "lock"
    if make is make_link:
        lock.unlink()
        lock.symlink_to(path.parent / "kept")
    else:
        make(lock)
    with pytest.raises(StateUnusable, match="can't be used"):
        StateDirectory(path)


# -- for its owner only --------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_nobody_else_may_read_it_whatever_the_umask_is(umask: None, path: Path) -> None:
    folder = begin(path)
    modes = {each.name: each.stat().st_mode & 0o777 for each in (path, folder, path / "lock", *folder.iterdir())}
    assert modes.keys() == {"state", f"a@{EPOCH}", "lock", "pool.json", "log-0"}
    assert {
        name: mode for name, mode in modes.items() if mode & ~(0o700 if name in ("state", folder.name) else 0o600)
    } == {}
    assert modes["state"] == modes[folder.name] == 0o700


def test_a_directory_that_others_may_use_is_told(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)
    with pytest.raises(StateUnusable, match=r"has mode 0750, so others can use it; must be 0700"):
        StateDirectory(path)
    path.chmod(0o700)
    StateDirectory(path).close()
