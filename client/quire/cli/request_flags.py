"""The flags of `quire generate` that make a request: sampling, ends, grammar, log-probabilities, cache.

SamplingParams, Grammar and CacheParams check the values. flag_names() has the flags of the fields that errors name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.serving.flags import FILE, Flag, option, options_of

if TYPE_CHECKING:  # `quire --help` answers at once
    from quire.client.engine.caching import CacheParams
    from quire.client.engine.grammar import Grammar
    from quire.client.engine.sampling import SamplingParams

CACHE_USES = ("read-and-write", "write-only", "none")


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers with something between them, TOKEN=NUMBER; the last ones may be left out."""

    def __init__(self, name: str, kinds: Sequence[type[int] | type[float]], separators: str, *, least: int = 2) -> None:
        self.name = name
        self._kinds = kinds
        self._separators = separators
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        parts, rest = [], str(value)
        for separator in self._separators:
            part, found, rest = rest.partition(separator)
            parts.append(part)
            if not found:
                break
        else:
            parts.append(rest)
        try:
            numbers = tuple(kind(part) for kind, part in zip(self._kinds, parts, strict=False))
        except ValueError:
            numbers = ()
        if len(numbers) < self._least:
            self.fail(f"{value!r} is not {self.name}", param, ctx)
        return numbers


class _TokenIds(click.ParamType[tuple[int, ...]]):
    """Token ids with commas between them."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not token ids with commas between them", param, ctx)


BIAS = _Numbers("TOKEN=NUMBER", (int, float), "=")
RETENTION = _Numbers("TOKENS=PRIORITY[:SECONDS]", (int, int, float), "=:")

SECTIONS: Mapping[str, Sequence[Flag]] = {
    "How tokens are chosen": (
        option("--temperature", default=1.0, metavar="NUMBER", help="0: always the most probable token."),
        option("--top-k", default=0, metavar="COUNT", help="Only the k most probable tokens; 0: all."),
        option(
            "--top-p",
            default=1.0,
            metavar="NUMBER",
            help="Only the most probable tokens that add up to this, in (0, 1].",
        ),
        option(
            "--min-p",
            default=0.0,
            metavar="NUMBER",
            help="Only tokens with at least this part of the highest probability, 0 to 1.",
        ),
        option(
            "--repetition-penalty",
            default=1.0,
            metavar="NUMBER",
            help="Above 1: tokens that occurred are less probable.",
        ),
        option(
            "--presence-penalty",
            default=0.0,
            metavar="NUMBER",
            help="Above 0: tokens generated before are less probable. -2 to 2.",
        ),
        option(
            "--frequency-penalty",
            default=0.0,
            metavar="NUMBER",
            help="Above 0: a token is less probable for each time that it was generated. -2 to 2.",
        ),
        option(
            "--logit-bias",
            type=BIAS,
            multiple=True,
            metavar=BIAS.name,
            help="Add the number, -100 to 100, to the logit of the token with this id. May be given several times.",
        ),
        option("--allowed-token-ids", type=_TokenIds(), metavar="ID,...", help="Choose no other tokens."),
        option(
            "--bad-word",
            multiple=True,
            metavar="TEXT",
            help="Do not generate this text, with or without a space before it. May be given several times.",
        ),
        option(
            "--seed",
            type=int,
            metavar="NUMBER",
            help="Fixes the random numbers. Default: random. The text can still differ beside other "
            "requests: the logits depend on the batch by rounding, unless the worker runs with --deterministic.",
        ),
    ),
    "When a sample ends": (
        option("--max-tokens", default=128, metavar="COUNT", help="Most tokens per sample."),
        option("--min-tokens", default=0, metavar="COUNT", help="No sample ends before it has so many tokens."),
        option(
            "--stop", multiple=True, metavar="TEXT", help="End a sample before this text. May be given several times."
        ),
        option(
            "--stop-token-id",
            type=int,
            multiple=True,
            metavar="ID",
            help="End a sample at this token. May be given several times.",
        ),
        option("--ignore-eos", is_flag=True, help="Continue after the model's end tokens."),
        option("--timeout", type=float, metavar="SECONDS", help="End with the tokens generated until then."),
    ),
    "The form of the text, one at most": (
        option("--json-schema", type=FILE, metavar="FILE", help="A JSON schema."),
        option("--json-object", is_flag=True, help="Any JSON object."),
        option("--regex", metavar="PATTERN", help="A regular expression for the whole text."),
        option("--grammar", type=FILE, metavar="FILE", help="A grammar in llguidance's variant of Lark."),
        option("--ebnf", type=FILE, metavar="FILE", help="A grammar in the EBNF of llama.cpp (GBNF)."),
        option("--choice", multiple=True, metavar="TEXT", help="One of these texts: give it several times."),
    ),
    "Output": (
        option("--n", default=1, metavar="COUNT", help="Samples of the prompt. They share its blocks."),
        option("--best-of", type=int, metavar="COUNT", help="Generate so many samples; show the n most probable ones."),
        option("--include-stop-str-in-output", is_flag=True, help="Show the text or token at which a sample ends."),
        option("--show-special-tokens", is_flag=True, help="Show special tokens in the text."),
        option("--logprobs", type=int, metavar="COUNT", help="Log-probabilities: of each token and this many others."),
        option("--prompt-logprobs", type=int, metavar="COUNT", help="The same for the tokens of the prompt."),
    ),
    "Tenant, priority and cache": (
        option("--tenant", default="", metavar="NAME", help="The tenant; another one needs the role gateway."),
        option(
            "--priority",
            default=0,
            metavar="NUMBER",
            help="An engine serves requests of a higher priority first.",
        ),
        option(
            "--cache-use",
            type=click.Choice(CACHE_USES),
            default=CACHE_USES[0],
            help="Use of the prefix cache: find prompt blocks in it, and publish them in it.",
        ),
        option("--adapter", default="", metavar="NAME", help="Compute the request with this adapter of the worker."),
        option("--salt", default="", metavar="TEXT", help="Share prefix blocks only with requests of the same salt."),
        option(
            "--retention",
            type=RETENTION,
            multiple=True,
            metavar=RETENTION.name,
            help="Priority, 1 to 9, of so many tokens in the prefix cache, and for how long; 0 tokens: all that "
            "follow. May be given several times, for one range of tokens after the other.",
        ),
        option(
            "--expected-back",
            type=float,
            metavar="SECONDS",
            help="Seconds until these tokens will be asked for again; inf: never.",
        ),
        option("--reserve", is_flag=True, help="Begin only if the pool has room for all of --max-tokens."),
    ),
}
REQUEST_FLAGS = [flag for flags in SECTIONS.values() for flag in flags]

# Parameters with a flag that is not named as the field.
_RENAMED = {
    "timeout": "timeout_s",
    "bad_word": "bad_words",
    "stop_token_id": "stop_token_ids",
    "expected_back": "expected_back_s",
    "show_special_tokens": "skip_special_tokens",
}
_GRAMMARS = {
    "json_schema": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "lark",
    "ebnf": "ebnf",
    "choice": "choice",
}


def flag_names(values: Mapping[str, Any]) -> Mapping[str, str]:
    """Return flags by the field that an error names, where the names differ; values are those of REQUEST_FLAGS."""
    names = {field: _flag_of(name) for name, field in _RENAMED.items()}
    names |= {f"retention.{field}": "--retention" for field in ("num_tokens", "priority", "ttl_s")}
    names |= {f"grammar.{kind}": _flag_of(name) for name, kind in _GRAMMARS.items()}
    for name in filter(values.get, _GRAMMARS):
        names |= dict.fromkeys(("grammar", "sampling.grammar"), _flag_of(name))
    return names


def request_of(values: Mapping[str, Any]) -> tuple[SamplingParams, CacheParams]:
    """Return the parameters that the values of REQUEST_FLAGS describe, without the adapter, which the worker names.

    Raises InvalidRequest, click.ClickException.
    """
    from quire.client.engine.caching import CacheParams, CacheUse, Retention
    from quire.client.engine.sampling import SamplingParams

    fields = {_RENAMED.get(name, name): value for name, value in values.items() if name not in _GRAMMARS}
    del fields["adapter"]
    cache = {name: fields.pop(name) for name in ("salt", "retention", "expected_back_s", "reserve")}
    cache["salt"] = os.fsencode(cache["salt"])
    cache["retention"] = tuple(Retention(*each) for each in cache["retention"])
    cache["cache_use"] = CacheUse(fields.pop("cache_use").replace("-", "_"))
    fields["skip_special_tokens"] = not fields["skip_special_tokens"]
    return SamplingParams(**fields, grammar=_grammar_of(values)), CacheParams(**cache)


def _grammar_of(values: Mapping[str, Any]) -> Grammar | None:
    from quire.client.engine.grammar import Grammar

    given = [name for name in _GRAMMARS if values[name]]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(map(_flag_of, given))} can't be combined: a text has one grammar.")
    return Grammar(**{_GRAMMARS[name]: _text_of(name, values[name]) for name in given}) if given else None


def _text_of(name: str, value: Any) -> Any:
    """Return the text of a file; any other value as it is. Raises click.BadParameter."""
    if not isinstance(value, Path):
        return value
    try:
        return value.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value} can't be read: {error}", param_hint=f"'{_flag_of(name)}'") from error


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class RequestCommand(click.Command):
    """A command with a help that lists the flags of a request in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections, then the other flags."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        records = {each.name: record for each in options if (record := each.get_help_record(ctx))}
        for title, flags in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(each.name) for each in options_of(flags)])
        with formatter.section("Services, and other options"):
            formatter.write_dl(list(records.values()))
