"""Tenants' shares of each pool, from the operator's file, read again when it changes. See docs/reference/security.md.

    [default]                # every tenant without a section of its own
    limit = "50%"            # of each pool's blocks; or a number of blocks
    pin_budget = "5%"
    keep_limit = "10%"
    max_leases = 100

    [tenants.alice]
    floor = 1000
    quota = "25%"
    limit = "80%"
    adapters = ["sql"]       # names

A setting that is missing in a section has the value that it has without a file. It does not come from [default].
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from quire.cache.v1.admission_bounds import ADAPTER_NAME, ADAPTER_NAME_LIMIT
from quire.cachemgr.blocks import BlockShare
from quire.serving.watched import FileError, WatchedFiles, read_bytes

_PERCENTAGE = re.compile(r"(?P<number>\d{1,3}(\.\d+)?) ?%")
_RISING = ("floor", "quota", "limit")
_AMOUNTS = (*_RISING, "pin_budget", "keep_limit")
_KEYS = (*_AMOUNTS, "max_leases", "adapters")
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Percentage:
    """A part of any pool, 0 to 100."""

    value: float

    def of(self, num_blocks: int) -> int:
        """Rounded down."""
        return int(num_blocks * self.value / 100)


Amount = int | Percentage
"""Blocks, or a part of a pool's."""
DEFAULT_KEEP_LIMIT = Percentage(25)


@dataclass(frozen=True, slots=True)
class Share:
    """The limits of a tenant in each pool.

    floor       blocks that it can always hold
    quota       if it holds and caches more, its cached blocks are evicted before others'; None: no quota
    limit       it never holds more; None: no limit
    pin_budget  it never pins more
    keep_limit  breakpoints of its prompts never keep more; None: the limit of all tenants without their own
    max_leases  in all pools together, those being fenced included; None: the limit of all tenants together
    adapters    names of the adapters that its sequences may have; None: all
    """

    floor: Amount = 0
    quota: Amount | None = None
    limit: Amount | None = None
    pin_budget: Amount = Percentage(10)
    keep_limit: Amount | None = None
    max_leases: int | None = None
    adapters: frozenset[str] | None = None

    def resolve(self, num_usable_blocks: int, *, keep_limit: Amount = DEFAULT_KEEP_LIMIT) -> BlockShare:
        """The share in blocks of a pool that has so many, without the null block. `keep_limit`: unless it has its own.

        Numbers of blocks and percentages can't be compared before: if they conflict in a pool, the larger is lowered,
        the quota to the limit and the floor to the quota.
        """

        def blocks(amount: Amount | None) -> int:
            if amount is None:
                return num_usable_blocks
            return min(amount.of(num_usable_blocks) if isinstance(amount, Percentage) else amount, num_usable_blocks)

        limit = blocks(self.limit)
        quota = min(blocks(self.quota), limit)
        kept = blocks(keep_limit if self.keep_limit is None else self.keep_limit)
        return BlockShare(min(blocks(self.floor), quota), quota, limit, blocks(self.pin_budget), kept)


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of all tenants: `tenants` by name, and `default` for all others.

    keep_limit  of each tenant without its own
    """

    default: Share = Share()
    tenants: Mapping[str, Share] = field(default_factory=dict)
    keep_limit: Amount = DEFAULT_KEEP_LIMIT

    def of(self, tenant: str) -> Share:
        """Return the share of a tenant."""
        return self.tenants.get(tenant, self.default)

    def resolve(self, num_usable_blocks: int) -> tuple[BlockShare, dict[str, BlockShare]]:
        """The default, and those by name, of a pool that has so many blocks."""

        def resolved(share: Share) -> BlockShare:
            return share.resolve(num_usable_blocks, keep_limit=self.keep_limit)

        return resolved(self.default), {name: resolved(share) for name, share in self.tenants.items()}

    @property
    def adapter_rights(self) -> tuple[frozenset[str] | None, dict[str, frozenset[str] | None]]:
        """The names of the adapters that tenants may use: the default, and those by tenant. None: all."""
        return self.default.adapters, {name: share.adapters for name, share in self.tenants.items()}


def watch_shares(path: Path, *, keep_limit: Amount = DEFAULT_KEEP_LIMIT) -> WatchedFiles[Shares]:
    """The shares of a file, read again when it changes. Raises FileError, when it is made, if it can't be used."""
    return WatchedFiles("tenants file", [path], lambda: read_shares(path, keep_limit=keep_limit))


def read_shares(path: Path, *, keep_limit: Amount = DEFAULT_KEEP_LIMIT) -> Shares:
    """`keep_limit`: of tenants without their own. Raises FileError, which names the file, the section and the key."""
    try:
        content = tomllib.loads(read_bytes(path).decode())
    except UnicodeDecodeError:
        raise FileError(f"{path}: not UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not TOML: {error}") from None
    try:
        return replace(_shares(content), keep_limit=keep_limit)
    except ValueError as error:
        raise FileError(f"{path}: {error}") from None


def _shares(content: Mapping[str, Any]) -> Shares:
    _refuse_others(content, ("default", "tenants"), "")
    default = _share(content.get("default", {}), "default")
    if default.floor != 0:
        raise ValueError(
            "default.floor: only a tenant with its own section can have a floor, as others are not counted"
        )
    sections = content.get("tenants", {})
    if not isinstance(sections, dict):
        raise ValueError("tenants must be sections, [tenants.NAME]")
    tenants = {name: _share(section, f"tenants.{name}") for name, section in sections.items()}
    floors = sum(share.floor.value for share in tenants.values() if isinstance(share.floor, Percentage))
    if floors > 100:
        raise ValueError(f"the floors of all tenants are {floors:g}% together; must be at most 100%")
    return Shares(default, tenants)


def _share(section: Any, where: str) -> Share:
    if not isinstance(section, dict):
        raise ValueError(f"{where} must be a section, [{where}]")
    _refuse_others(section, _KEYS, f"{where}.")
    amounts = {key: _amount(section[key], f"{where}.{key}") for key in _AMOUNTS if key in section}
    for smaller, larger in combinations([key for key in _RISING if key in amounts], 2):
        if _is_more(amounts[smaller], amounts[larger]):
            raise ValueError(f"{where}.{smaller} is more than {where}.{larger}")
    return Share(**amounts, max_leases=_max_leases(section, where), adapters=_adapters(section, where))


def _is_more(amount: Amount, other: Amount) -> bool:
    """Return True if amount is more than other in every pool. Blocks and percentages can't be compared."""
    if isinstance(amount, Percentage) and isinstance(other, Percentage):
        return amount.value > other.value
    return isinstance(amount, int) and isinstance(other, int) and amount > other


def _amount(value: Any, name: str) -> Amount:
    match = _PERCENTAGE.fullmatch(value) if isinstance(value, str) else None
    if match is not None and float(match["number"]) <= 100:
        return Percentage(float(match["number"]))
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
        return value
    raise ValueError(f'{name} is {value!r}; must be a number of blocks, 0 to {MAX_COUNT}, or "0%" to "100%"')


def _max_leases(section: Mapping[str, Any], where: str) -> int | None:
    value = section.get("max_leases")
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT:
        return value
    raise ValueError(f"{where}.max_leases is {value!r}; must be a number, 0 to {MAX_COUNT}")


def _adapters(section: Mapping[str, Any], where: str) -> frozenset[str] | None:
    value = section.get("adapters")
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(name, str) and re.fullmatch(ADAPTER_NAME, name) for name in value):
        return frozenset(value)
    raise ValueError(f"{where}.adapters is {value!r}; must be a list of names of {ADAPTER_NAME_LIMIT}")


def _refuse_others(section: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for key in section:
        if key not in known:
            raise ValueError(f"{prefix}{key} is not known; must be one of {', '.join(known)}")
