"""The fields of a body that say what of its prompt is to be kept in the cache, as OpenAI and Anthropic have them. Pure.

`cache_control` and `prompt_cache_breakpoint` are fields of a part: the prefix up to its end is kept. All endpoints take
both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.cache.v1.admission_bounds import MAX_BREAKPOINTS
from quire.gateway.chat.prefix_ends import BehindAll, Place, PrefixEnd
from quire.gateway.errors import HttpError
from quire.gateway.fields import Fields

CONTROL, BREAKPOINT = "cache_control", "prompt_cache_breakpoint"

_TTLS = {"5m": 300.0, "30m": 1_800.0, "1h": 3_600.0, "12h": 43_200.0, "24h": 86_400.0}
# What each service takes if no ttl is given.
_CONTROL_TTL, _BREAKPOINT_TTL = "5m", "30m"
_RETENTIONS = ("in_memory", "in-memory", "24h")


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """OpenAI's fields of a body.

    is_explicit     there is no breakpoint but those of parts; without any the request does not use the cache
    ttl             of breakpoints without one of their own
    keeps_all       the whole prompt is kept
    compared_with   the id of an earlier answer that a diagnosis compares with; None: none is asked for
    only_warms      nothing is generated
    """

    is_explicit: bool = False
    ttl: str = _BREAKPOINT_TTL
    keeps_all: bool = False
    compared_with: str | None = None
    only_warms: bool = False


def read_cache_options(fields: Fields) -> CacheOptions:
    """Return the options of a body. Raises HttpError: 400 with the field's path."""
    fields.string("prompt_cache_key")
    retention = fields.choice("prompt_cache_retention", _RETENTIONS)
    asked = fields.object("prompt_cache_options") or Fields({})
    is_explicit = asked.choice("mode", ("implicit", "explicit"), "implicit") == "explicit"
    ttl = asked.choice("ttl", tuple(_TTLS)) or ("24h" if retention == "24h" else None)
    options = CacheOptions(
        is_explicit=is_explicit,
        ttl=ttl or _BREAKPOINT_TTL,
        keeps_all=ttl is not None and not is_explicit,
        compared_with=asked.string("comparison_response_id"),
        only_warms=asked.boolean("prewarm"),
    )
    asked.end()
    return options


@dataclass(slots=True)
class KeptEnds:
    """Ends of prefixes to keep, collected while the parts of a body are read, in their order."""

    options: CacheOptions = CacheOptions()
    _controls: list[PrefixEnd] = field(default_factory=list)
    _breakpoints: list[PrefixEnd] = field(default_factory=list)

    def take(self, part: Fields, place: Place) -> None:
        """Read both fields of a part that ends at this place. Raises HttpError: 400 with the field's path."""
        if (control := part.object(CONTROL)) is not None:
            control.require("type")
            control.choice("type", ("ephemeral",))
            ttl = control.choice("ttl", tuple(_TTLS), _CONTROL_TTL)
            control.ignore(*control)
            self._controls.append(PrefixEnd(part.path_of(CONTROL), place, _TTLS[ttl or _CONTROL_TTL]))
        if (given := part.object(BREAKPOINT)) is not None:
            given.choice("mode", ("explicit",), "explicit")
            ttl = given.choice("ttl", tuple(_TTLS), self.options.ttl)
            given.end()
            self._breakpoints.append(PrefixEnd(part.path_of(BREAKPOINT), place, _TTLS[ttl or self.options.ttl]))

    @property
    def ends(self) -> tuple[PrefixEnd, ...]:
        """Return the ends to keep: of OpenAI's the last ones. Raises HttpError: 400 for too many of Anthropic's."""
        if len(self._controls) > MAX_BREAKPOINTS:
            path = self._controls[MAX_BREAKPOINTS].path
            message = f"{path} is the fifth {CONTROL} of the request, must be at most {MAX_BREAKPOINTS}"
            raise HttpError(400, message, code="too_many_values", param=path)
        kept = [*self._controls, *self._breakpoints]
        if self.options.keeps_all:
            kept.append(PrefixEnd("prompt_cache_options", BehindAll(), _TTLS[self.options.ttl]))
        return tuple(kept[-MAX_BREAKPOINTS:])

    @property
    def uses_cache(self) -> bool:
        """Return False for a request that wants breakpoints of its own alone, and has none."""
        return not self.options.is_explicit or bool(self.ends)
