"""The tenants' file: its shares, its errors, and that it is read again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from quire.cachemgr.shares import Percentage, Share, Shares, read_shares, watch_shares
from quire.serving.watched import FileError

FILE = """
[default]                # every tenant without a section
limit = "50%"
pin_budget = "5%"
max_leases = 100

[tenants.alice]
floor = 1000
quota = "25 %"
limit = "80%"

[tenants."quire://bob"]
floor = "12.5%"
max_leases = 0
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.toml"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_tenants_have_their_section_and_others_the_default(path: Path) -> None:
    shares = read_shares(write(path, FILE))
    assert shares.of("carol") == Share(limit=Percentage(50), pin_budget=Percentage(5), max_leases=100)
    assert shares.of("alice") == Share(floor=1000, quota=Percentage(25), limit=Percentage(80))
    assert shares.of("quire://bob") == Share(floor=Percentage(12.5), max_leases=0)


def test_a_tenant_may_use_the_adapters_of_its_section(path: Path) -> None:
    text = '[default]\nadapters = []\n[tenants.alice]\nadapters = ["sql", "a.b"]\n[tenants.bob]\n'
    assert read_shares(write(path, text)).adapter_rights == (
        frozenset(),
        {"alice": frozenset({"sql", "a.b"}), "bob": None},
    )
    assert Shares().adapter_rights == (None, {})


@pytest.mark.parametrize("text", ["# nothing\n", "[default]\n", "[tenants]\n"])
def test_without_a_word_everybody_may_have_everything(path: Path, text: str) -> None:
    shares = read_shares(write(path, text))
    assert shares == Shares()
    assert shares.of("anybody").resolve(1000) == (0, 1000, 1000, 100, 250)
    assert shares.of("anybody").max_leases is None


def test_who_has_no_keep_limit_has_the_one_of_all(path: Path) -> None:
    shares = read_shares(write(path, "[tenants.alice]\nkeep_limit = 7\n[tenants.bob]\n"), keep_limit=Percentage(40))
    default, by_name = shares.resolve(100)
    assert (default.keep_limit, by_name["alice"].keep_limit, by_name["bob"].keep_limit) == (40, 7, 40)


@pytest.mark.parametrize(
    ("share", "resolved"),
    [
        (Share(floor=Percentage(10), quota=Percentage(20), limit=Percentage(30), pin_budget=7), (99, 199, 299, 7, 249)),
        (Share(floor=1, quota=2, limit=3), (1, 2, 3, 99, 249)),
        (Share(floor=2000, quota=2000, limit=2000, pin_budget=2000), (999, 999, 999, 999, 249)),
        (Share(floor=600, quota=700, limit=Percentage(50)), (499, 499, 499, 99, 249)),
        (Share(floor=600, quota=Percentage(10)), (99, 99, 999, 99, 249)),
        (Share(limit=0, pin_budget=Percentage(0)), (0, 0, 0, 0, 249)),
        (Share(keep_limit=Percentage(10)), (0, 999, 999, 99, 99)),
        (Share(keep_limit=0), (0, 999, 999, 99, 0)),
        (Share(keep_limit=2000), (0, 999, 999, 99, 999)),
        (Share(floor=Percentage(100), limit=Percentage(100), pin_budget=Percentage(100)), (999, 999, 999, 999, 249)),
    ],
)
def test_a_share_in_blocks_of_a_pool(share: Share, resolved: tuple[int, ...]) -> None:
    assert share.resolve(999) == resolved


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the file is empty"),
        ("[default", "not TOML"),
        ("[defaults]", "defaults is not known; must be one of default, tenants"),
        (
            "[default]\nquotas = 1",
            "default.quotas is not known; must be one of floor, quota, limit, pin_budget, keep_limit, max_le",
        ),
        ("[tenants.a]\nFloor = 1", "tenants.a.Floor is not known"),
        ("default = 1", "default must be a section, [default]"),
        ("tenants = 1", "tenants must be sections, [tenants.NAME]"),
        ("[tenants]\na = 1", "tenants.a must be a section, [tenants.a]"),
        ("[default]\nfloor = 1", "default.floor: only a tenant with its own section"),
        ('[default]\nfloor = "1%"', "default.floor: only a tenant with its own section"),
        ("[default]\nlimit = -1", "default.limit is -1; must be a number of blocks, 0 to 2147483647, or"),
        ("[default]\nlimit = 2147483648", "default.limit is 2147483648; must be"),
        ("[default]\nlimit = 1.5", "default.limit is 1.5; must be"),
        ("[default]\nlimit = true", "default.limit is True; must be"),
        ('[default]\nlimit = "101%"', "default.limit is '101%'; must be"),
        ('[default]\nlimit = "-1%"', "default.limit is '-1%'; must be"),
        ('[default]\nlimit = "10"', "default.limit is '10'; must be"),
        ('[default]\nlimit = "nan%"', "default.limit is 'nan%'; must be"),
        ("[default]\nmax_leases = -1", "default.max_leases is -1; must be a number, 0 to 2147483647"),
        ('[default]\nmax_leases = "5%"', "default.max_leases is '5%'; must be a number"),
        ("[default]\nadapters = 'sql'", "default.adapters is 'sql'; must be a list of names of 1 to 128 letters"),
        ("[tenants.a]\nadapters = ['a b']", "tenants.a.adapters is ['a b']; must be a list of names"),
        ("[tenants.a]\nmax_leases = false", "tenants.a.max_leases is False; must be a number"),
        ("[tenants.a]\nfloor = 2\nquota = 1", "tenants.a.floor is more than tenants.a.quota"),
        ("[tenants.a]\nfloor = 2\nlimit = 1", "tenants.a.floor is more than tenants.a.limit"),
        ('[tenants.a]\nfloor = 2\nquota = "50%"\nlimit = 1', "tenants.a.floor is more than tenants.a.limit"),
        ('[default]\nquota = "2%"\nlimit = "1%"', "default.quota is more than default.limit"),
        (
            '[tenants.a]\nfloor = "60%"\n[tenants.b]\nfloor = "40.5%"',
            "the floors of all tenants are 100.5% together; must be at most 100%",
        ),
    ],
)
def test_what_is_wrong_is_named(path: Path, text: str, complaint: str) -> None:
    with pytest.raises(FileError) as caught:
        read_shares(write(path, text))
    assert str(caught.value).startswith(f"{path}: {complaint}")


def test_a_file_that_is_not_there_or_no_text_is_named(path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        watch_shares(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="not UTF-8"):
        watch_shares(path)


@pytest.mark.parametrize(
    "text",
    [
        "[tenants.a]\nfloor = 5\nquota = 5\nlimit = 5",
        '[tenants.a]\nfloor = 1000000\nlimit = "1%"',  # comparable in a pool only
        '[tenants.a]\nfloor = "60%"\n[tenants.b]\nfloor = "40%"\n[tenants.c]\nfloor = 9',
        '[default]\nlimit = "100%"\nquota = "0%"',
    ],
)
def test_what_is_right_is_taken(path: Path, text: str) -> None:
    read_shares(write(path, text))


def test_the_file_is_read_again_and_a_wrong_one_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched = watch_shares(write(path, "[default]\nmax_leases = 1"))
    assert watched.current().of("a").max_leases == 1
    write(path, "[default]\nmax_leases = 22")
    assert watched.current().of("a").max_leases == 22
    with caplog.at_level(logging.ERROR):
        write(path, "[default]\nmax_leases = 333\nminimum = 1")
        assert watched.current().of("a").max_leases == 22
    assert "tenants file not reloaded, the one before stays" in caplog.text
    assert "default.minimum is not known" in caplog.text
    write(path, "[default]\nmax_leases = 4444")
    assert watched.current().of("a").max_leases == 4444
