"""The configuration of an experiment, read from TOML.

[load]        requests: a trace, or sessions that are made
[fleet]       workers: their number, the time of a step, the pool
[policy]      the router, and the engines' scheduling policy
[limits]      the times that a good request keeps
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from quire.cache.v1 import attach_pb2
from quire.cache.v1.layer_spans import LayerGroupKind
from quire.cachemgr._core import DEFAULT_POLICY, POLICIES
from quire.cachemgr.errors import CallRefused
from quire.cachemgr.service import messages
from quire.client.engine.scheduling import layer_groups as engine_groups
from quire.client.engine.scheduling.plans import DEFAULT_EXPECTED_PROMPTS
from quire.client.engine.scheduling.tier import DEFAULT_COPY_BYTES_PER_S
from quire.lab.errors import ConfigError
from quire.lab.sessions import KINDS, Sessions
from quire.lab.step_times import PRESETS, StepTime, calibrate
from quire.lab.tokens import VOCABULARY_SIZE

_LENGTHS = ("unknown", "known")
_MODEL = "lab"
_MOST_INT32 = 2**31 - 1
"""Of the contract's fields. cachemgr checks the limits of their values."""
_NAMES_HERE = {
    "geometry": "fleet", "host_block_count": "host_blocks", "disk_block_count": "disk_blocks",
    "window_token_count": "window", "layer_count": "layers",
}  # fmt: skip
"""Fields of the contract by their names in a configuration."""


def _check(where: str, given: Any, limits: Mapping[str, tuple[float, float]]) -> None:
    for name, (low, high) in limits.items():
        value = getattr(given, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError.of_field(f"{where}.{name}", value, f"{low:.12g} to {high:.12g}")


@dataclass(frozen=True, slots=True)
class Load:
    """The requests.

    trace      a file of recorded requests (traces.py); or
    sessions   parameters of made ones
    requests   at most; 0: all of the trace
    rate       for a trace: requests a second at random times (Poisson) instead of the trace's own times; 0: these.
               Conversations of ShareGPT have no times and need it
    speed      divides the times of a trace
    think_s    for a trace without times: from the end of a request to the next one of its conversation
    lengths    "unknown": a request names no max_tokens, and its last token is an end token; "known": max_tokens is the
               length of the answer, so a policy can read it
    tenants    parts of the sessions by tenant
    """

    trace: Path | None = None
    sessions: Sessions | None = None
    requests: int = 0
    rate: float = 0.0
    speed: float = 1.0
    think_s: float = 10.0
    lengths: str = "unknown"
    tenants: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.sessions is None):
            raise ConfigError("load has neither or both of trace and sessions: must be one of them")
        _check("load", self, {"requests": (0, 10_000_000), "rate": (0, 1e6), "speed": (1e-6, 1e6), "think_s": (0, 1e6)})
        if self.sessions is not None and not self.requests:
            raise ConfigError.of_field("load.requests", 0, "1 or more, with sessions")
        if self.lengths not in _LENGTHS:
            raise ConfigError.of_field("load.lengths", self.lengths, f"one of {', '.join(_LENGTHS)}")
        for tenant, part in self.tenants.items():
            if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part < 1e9:
                raise ConfigError.of_field(f"load.tenants.{tenant}", part, "a number above 0")
        if not self.tenants:
            raise ConfigError.of_field("load.tenants", {}, "at least one tenant")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that see the same positions: kind "full", "sliding" or "chunked". window: tokens of a window or chunk."""

    kind: str
    layers: int
    window: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{f' {self.window}' if self.window else ''}, {self.layers} layers"

    @property
    def sees(self) -> engine_groups.LayerGroup:
        """The positions that a token sees."""
        return engine_groups.LayerGroup(LayerGroupKind(self.kind), self.window)

    @property
    def message(self) -> attach_pb2.LayerGroup:
        """The group as a worker registers it."""
        kind = messages.LAYER_GROUP_KINDS[LayerGroupKind(self.kind)]
        return attach_pb2.LayerGroup(kind=kind, window_token_count=self.window, layer_count=self.layers)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers, all alike. Each has a pool, an engine and a model of the time of its steps.

    step                   a preset, a JSON result of `quire bench step`, or a table of coefficients (step_times.py)
    blocks                 usable blocks of a pool, each of one layer group; 0: as many as the preset has room for
    host_blocks            blocks of the host tier; 0: there is none
    host_cache_share       part of them that may keep copies of evicted blocks, as the worker's --host-cache-share
    disk_blocks            blocks of the disk below the host tier; 0: there is none
    layer_groups           the model's layers; none: one full group
    eviction               cachemgr's --eviction-policy, or "FILE.py:CLASS" (quire.cachemgr.eviction_interface)
    separate_tenants       tenants do not find one another's prefixes, as with `--tenants` of a gateway
    """

    step: StepTime
    blocks: int
    workers: int = 1
    block_size: int = 16
    eviction: str = DEFAULT_POLICY
    max_running_sequences: int = 256
    max_expected_prompts: int = DEFAULT_EXPECTED_PROMPTS
    max_step_tokens: int = 2048
    max_sequence_tokens: int = 131_072
    separate_tenants: bool = False
    host_blocks: int = 0
    host_cache_share: float = 0.0
    disk_blocks: int = 0
    layer_groups: tuple[LayerGroup, ...] = ()

    def __post_init__(self) -> None:
        limits = {
            "workers": (1, 1000), "blocks": (1, 2**24 - 1), "block_size": (1, 1024),
            "max_running_sequences": (1, 65_536), "max_step_tokens": (1, 2**20), "max_sequence_tokens": (2, 2**24),
            "host_blocks": (0, _MOST_INT32), "max_expected_prompts": (0, 65_536), "host_cache_share": (0, 1),
            "disk_blocks": (0, _MOST_INT32),
        }  # fmt: skip
        _check("fleet", self, limits)
        try:
            messages.decode_geometry(self.geometry)
        except CallRefused as error:
            said = error.refusal.metadata
            name = ".".join(_NAMES_HERE.get(part, part) for part in said["field"].split("."))
            raise ConfigError(f"{name} is {said['value']}: must be {said['limit']}") from None
        if self.host_blocks and not self.step.copy_s:
            raise ConfigError.of_field("fleet.step.copy_s", self.step.copy_s, "above 0, with fleet.host_blocks")
        if self.host_cache_share and not self.host_blocks:
            raise ConfigError.of_field("fleet.host_cache_share", self.host_cache_share, "0, without fleet.host_blocks")
        for name in ("read_s", "write_s") if self.disk_blocks else ():
            if not getattr(self.step, name):
                raise ConfigError.of_field(f"fleet.step.{name}", 0, "above 0, with fleet.disk_blocks")

    @property
    def geometry(self) -> attach_pb2.PoolGeometry:
        """The sizes of a pool, as its worker registers them.

        A block has the bytes that are copied in copy_s at the rate that engines assume before they have measured one.
        """
        return attach_pb2.PoolGeometry(
            block_size_tokens=self.block_size,
            block_count=self.blocks + 1,
            block_bytes=max(1, round(self.step.copy_s * DEFAULT_COPY_BYTES_PER_S)),
            max_sequence_count=self.max_running_sequences,
            max_sequence_tokens=self.max_sequence_tokens,
            vocabulary_size=VOCABULARY_SIZE,
            model=_MODEL,
            model_fingerprint=_MODEL,
            host_block_count=self.host_blocks,
            host_cached_block_limit=int(self.host_cache_share * self.host_blocks),
            disk_block_count=self.disk_blocks,
            layer_groups=[group.message for group in self.layer_groups],
        )

    @property
    def layer_parts(self) -> dict[engine_groups.LayerGroup, float]:
        """The part of the model's layers that see the same positions."""
        num_layers: Counter[engine_groups.LayerGroup] = Counter()
        for group in self.layer_groups:
            num_layers[group.sees] += group.layers
        return {sees: count / num_layers.total() for sees, count in num_layers.items()} or {engine_groups.FULL: 1.0}

    @property
    def eviction_in_use(self) -> str:
        """The eviction policy: those of the crate are all `lru` in a pool with windows."""
        tables = engine_groups.BlockTables(self.block_size, [group.sees for group in self.layer_groups])
        return "lru" if tables.has_windows and self.eviction in POLICIES else self.eviction


@dataclass(frozen=True, slots=True)
class Choice:
    """The policies: a name, or "FILE.py:CLASS".

    router      routers.py has those with a name
    scheduler   an engine's policy; "priority" is the default one
    """

    router: str = "cost"
    scheduler: str = "priority"


@dataclass(frozen=True, slots=True)
class Limits:
    """A request is good if its first token and the mean time of each further one keep these."""

    first_token_s: float = 2.0
    token_s: float = 0.1

    def __post_init__(self) -> None:
        _check("limits", self, {"first_token_s": (1e-6, 1e6), "token_s": (1e-6, 1e6)})


@dataclass(frozen=True, slots=True)
class LabConfig:
    """One way to serve a load. folder is where the paths of policies begin."""

    name: str
    load: Load
    fleet: Fleet
    policy: Choice = field(default_factory=Choice)
    limits: Limits = field(default_factory=Limits)
    folder: Path = Path()


def read_config(path: str | Path) -> LabConfig:
    """Read a configuration. Paths in it are relative to its folder. Raises ConfigError with the file and the field."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text())
        return config_of(table, name=path.stem, folder=path.parent)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def config_of(table: Mapping[str, Any], *, name: str, folder: Path = Path()) -> LabConfig:
    """The configuration of a table. Raises ConfigError."""
    _require_known("", table, ("name", "load", "fleet", "policy", "limits"))
    return LabConfig(
        name=str(table.get("name", name)),
        load=_load_of(_table(table, "load"), folder),
        fleet=_fleet_of(_table(table, "fleet"), folder),
        policy=_make(Choice, "policy", _table(table, "policy")),
        limits=_make(Limits, "limits", _table(table, "limits")),
        folder=folder,
    )


def _table(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError.of_field(name, found, "a table")
    return dict(found)


def _require_known(where: str, table: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in table:
        if name not in names:
            raise ConfigError(f"{where}{'.' if where else ''}{name} is unknown: must be one of {', '.join(names)}")


def _make(kind: Callable[..., Any], where: str, table: Mapping[str, Any], **converted: Any) -> Any:
    """A dataclass of a table. A field must have the type of its default, unless it may have several: then it checks."""
    named = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    _require_known(where, table, tuple(named))
    for name, value in table.items():
        wanted = named[name].type
        default = named[name].default
        if default is not MISSING and default is not None and name not in converted and " | " not in str(wanted):
            _require_type(f"{where}.{name}", value, type(default))
        elif name not in converted and wanted in ("int", "float", "str"):
            _require_type(f"{where}.{name}", value, {"int": int, "float": float, "str": str}[wanted])
    missing = [n for n, f in named.items() if f.default is MISSING and f.default_factory is MISSING]
    for name in missing:
        if name not in table and name not in converted:
            raise ConfigError(f"{where}.{name} is missing")
    return kind(**{**table, **converted})


def _require_type(name: str, value: Any, wanted: type) -> None:
    if wanted in (int, float):
        allowed = int if wanted is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ConfigError.of_field(name, value, "a whole number" if wanted is int else "a number")
    elif wanted in (str, bool) and not isinstance(value, wanted):
        raise ConfigError.of_field(name, value, "a text" if wanted is str else "true or false")


def _load_of(table: dict[str, Any], folder: Path) -> Load:
    converted: dict[str, Any] = {}
    if "trace" in table:
        _require_type("load.trace", table["trace"], str)
        converted["trace"] = folder / table["trace"]
    if "sessions" in table:
        converted["sessions"] = _sessions_of(table["sessions"])
    if "tenants" in table:
        converted["tenants"] = _table(table, "tenants")
    load: Load = _make(Load, "load", table, **converted)
    return load


def _sessions_of(given: Any) -> Sessions:
    """A kind by name, or a table with `kind` and parameters that replace the kind's."""
    table = dict(given) if isinstance(given, Mapping) else {"kind": given}
    kind = table.pop("kind", "chat")
    if kind not in KINDS:
        raise ConfigError.of_field("load.sessions.kind", kind, f"one of {', '.join(KINDS)}")
    sessions: Sessions = _make(Sessions, "load.sessions", {**KINDS[kind], **table})
    return sessions


def _fleet_of(table: dict[str, Any], folder: Path) -> Fleet:
    step, num_blocks = table.get("step", "h100-8b"), table.get("blocks", 0)
    groups = _layer_groups_of(table.get("layer_groups", []))
    if isinstance(step, Mapping):
        made: StepTime = _make(StepTime, "fleet.step", step)
    elif isinstance(step, str) and step in PRESETS:
        made, room = _of_preset(step, table.get("block_size", 16), groups)
        num_blocks = num_blocks or room
    elif isinstance(step, str) and step.endswith(".json"):
        made, _ = calibrate(folder / step)
    else:
        limit = f"one of {', '.join(PRESETS)}, a file *.json of `quire bench step`, or a table of coefficients"
        raise ConfigError.of_field("fleet.step", step, limit)
    fleet: Fleet = _make(Fleet, "fleet", table, step=made, blocks=num_blocks, layer_groups=groups)
    return fleet


def _layer_groups_of(given: Any) -> tuple[LayerGroup, ...]:
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise ConfigError.of_field("fleet.layer_groups", given, "a list of tables with kind, layers and window")
    kinds = tuple(LayerGroupKind)
    groups = []
    for index, table in enumerate(given):
        name = f"fleet.layer_groups[{index}]"
        group: LayerGroup = _make(LayerGroup, name, table)
        if group.kind not in kinds:
            raise ConfigError.of_field(f"{name}.kind", group.kind, f"one of {', '.join(kinds)}")
        _check(name, group, {"layers": (1, _MOST_INT32), "window": (0, _MOST_INT32)})
        groups.append(group)
    return tuple(groups)


def _of_preset(name: str, block_size: Any, groups: tuple[LayerGroup, ...]) -> tuple[StepTime, int]:
    """The times of a preset's steps and copies, and the blocks that it has room for."""
    _require_type("fleet.block_size", block_size, int)
    num_layers = PRESETS[name].num_layers
    given = sum(group.layers for group in groups)
    if groups and given != num_layers:
        raise ConfigError(f"fleet.layer_groups has {given} layers: must have {num_layers}, those of {name}")
    layers_per_block = max((group.layers for group in groups), default=num_layers)
    return PRESETS[name].pool(max(1, block_size), layers_per_block)
