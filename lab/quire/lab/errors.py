"""Errors in the input of the laboratory."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """A configuration, a trace or a policy file can't be used. The text names the file or field, and the limit."""

    @classmethod
    def of_field(cls, field: str, value: Any, limit: str) -> ConfigError:
        """The error for a field with a wrong value."""
        return cls(f"{field} is {value!r}: must be {limit}")
