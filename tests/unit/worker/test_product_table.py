"""The table of products: what is shipped, what is written is read again, and what is malformed is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.worker.fusion.product_table import (
    ROW_COUNTS,
    TABLE_FILE,
    ProductKey,
    ProductKind,
    TableEntry,
    read_table,
    write_table,
)

TILING = {"form": "gemv", "block_outputs": 4, "block_inputs": 1024, "num_warps": 4, "num_stages": 1, "split": 1}
KEY = ProductKey(ProductKind.NORM_GATED, 3072, 1024, "bfloat16", 2)


def entry(**changes: Any) -> TableEntry:
    return TableEntry(KEY._replace(**changes), TILING, own_us=3.456, library_us=7.0)


def test_the_shipped_table_is_read_and_decides_only_what_was_measured() -> None:
    for device_name, entries in json.loads(TABLE_FILE.read_text()).items():
        table = read_table(device_name)
        assert len(table) == len(entries)
        assert all(each.own_us < each.library_us for each in table.values())
    assert read_table("a GPU that nobody has measured") == {}


def test_what_is_written_is_read_again_and_other_devices_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    write_table("first", [entry(num_rows=4), entry()], path)
    write_table("second", [entry(kind=ProductKind.PLAIN)], path)
    write_table("third", [], path)
    assert list(read_table("first", path)) == [KEY, KEY._replace(num_rows=4)]
    assert read_table("first", path)[KEY] == TableEntry(KEY, TILING, own_us=3.46, library_us=7.0)
    assert list(read_table("second", path)) == [KEY._replace(kind=ProductKind.PLAIN)]
    assert read_table("third", path) == {}
    before = path.read_text()
    write_table("second", list(read_table("second", path).values()), path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ('{"gpu": 3}', "TypeError"),
        ('{"gpu": [{"kind": "plain"}]}', "KeyError: 'num_rows'"),
        (json.dumps({"gpu": [entry(num_rows=3).as_json()]}), "num_rows=3 is not one of 1, 2, 4, 8, 16, 32, 64, 128"),
        (json.dumps({"gpu": [entry().as_json() | {"kind": "fast"}]}), "'fast' is not a valid ProductKind"),
        (json.dumps({"gpu": [entry().as_json() | {"tiling": 3}]}), "TypeError"),
    ],
)
def test_a_malformed_table_is_refused_by_name(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"products.json is no table of products: ") as refused:
        read_table("gpu", path)
    assert reason in str(refused.value)


def test_rows_that_are_measured_are_those_of_the_buckets() -> None:
    assert tuple(2**power for power in range(8)) == ROW_COUNTS
