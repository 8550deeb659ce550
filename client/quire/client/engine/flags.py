"""The flags of an engine that several commands have."""

from typing import Any

import click

from quire.client.engine.speculative import SpeculativeConfig
from quire.client.errors import InvalidRequest
from quire.serving.flags import Flag, option


class SpeculativeType(click.ParamType[SpeculativeConfig]):
    """A flag with the configuration of drafts: vLLM's JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> SpeculativeConfig:
        """Return the configuration. Fails for a field, or a value, that it can't have."""
        try:
            return value if isinstance(value, SpeculativeConfig) else SpeculativeConfig.of_json(str(value))
        except InvalidRequest as error:
            self.fail(str(error), param, ctx)


SPECULATIVE_FLAG: Flag = option(
    "--speculative-config",
    type=SpeculativeType(),
    metavar="JSON",
    show_default="no drafts",
    help='How tokens are guessed ahead, as in vLLM: {"method": "ngram", "num_speculative_tokens": 8}. '
    "docs/how-to/speculative-decoding.md has the fields.",
)
