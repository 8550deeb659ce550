"""The flags of `quire generate`: what request they make, and which flag an error names."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from quire.cli.command_line import explain
from quire.cli.request_flags import REQUEST_FLAGS, flag_names, request_of
from quire.client import CacheParams, CacheUse, Grammar, InvalidRequest, Retention, SamplingParams
from quire.serving.flags import add_flags

COMMAND: click.Command = click.command(add_flags(REQUEST_FLAGS)(lambda **_: None))


def values_of(*arguments: str) -> dict[str, Any]:
    return COMMAND.make_context("generate", list(arguments)).params


def request(*arguments: str) -> tuple[SamplingParams, CacheParams]:
    return request_of(values_of(*arguments))


def refusal(*arguments: str) -> click.ClickException:
    """Return the command line's message for wrong flags."""
    try:
        values = values_of(*arguments)
        try:
            request_of(values)
        except InvalidRequest as error:
            return explain(error, flags=flag_names(values))
    except click.BadParameter as error:
        return error
    raise AssertionError("nothing was refused")


def test_without_flags_a_request_is_the_default_one() -> None:
    assert request() == (SamplingParams(), CacheParams())


def test_every_parameter_of_a_request_has_a_flag(tmp_path: Path) -> None:
    (tmp_path / "schema").write_text('{"type": "null"}')
    params, cache = request(
        *(
            "--n",
            "2",
            "--best-of",
            "4",
            "--max-tokens",
            "9",
            "--min-tokens",
            "2",
            "--temperature",
            "0.5",
            "--top-k",
            "4",
            "--top-p",
            "0.9",
        ),
        *("--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "1", "--frequency-penalty", "-1"),
        *("--logit-bias", "5=-100", "--logit-bias", "6=1.5", "--allowed-token-ids", "1,5,6", "--bad-word", "a b"),
        *("--seed", "-3", "--stop", "x", "--stop-token-id", "7", "--stop-token-id", "8", "--ignore-eos"),
        *("--include-stop-str-in-output", "--show-special-tokens", "--logprobs", "0", "--prompt-logprobs", "3"),
        *("--priority", "-4", "--tenant", "t", "--timeout", "2.5", "--cache-use", "write-only", "--salt", "é"),
        *("--retention", "16=9:60", "--retention", "0=1", "--expected-back", "inf", "--reserve"),
    )
    expected = SamplingParams(
        n=2,
        best_of=4,
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias={5: -100.0, 6: 1.5},
        allowed_token_ids=(1, 5, 6),
        bad_words=("a b",),
        seed=-3,
        stop=("x",),
        stop_token_ids=(7, 8),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=0,
        prompt_logprobs=3,
        priority=-4,
        tenant="t",
        timeout_s=2.5,
    )
    assert params == expected
    assert cache == CacheParams(
        salt="é".encode(),
        cache_use=CacheUse.WRITE_ONLY,
        retention=(Retention(16, 9, 60.0), Retention(0, 1)),
        expected_back_s=math.inf,
        reserve=True,
    )
    schema, _ = request("--json-schema", str(tmp_path / "schema"))
    for made, default in ((params, SamplingParams()), (cache, CacheParams())):
        same = {field.name for field in fields(made) if getattr(made, field.name) == getattr(default, field.name)}
        without_flag = {"grammar", "kept_special_tokens", "breakpoints", "explain_miss", "adapter", "speculative"}
        assert not same - without_flag, "without a flag, or not in this test"
    assert schema.grammar == Grammar(json_schema='{"type": "null"}')


@pytest.mark.parametrize(
    ("arguments", "grammar"),
    [
        (("--json-object",), Grammar(json_object=True)),
        (("--regex", "a+"), Grammar(regex="a+")),
        (("--choice", "yes", "--choice", "no"), Grammar(choice=("yes", "no"))),
        (("--grammar", "FILE"), Grammar(lark="text of the file")),
        (("--ebnf", "FILE"), Grammar(ebnf="text of the file")),
    ],
)
def test_each_kind_of_grammar_has_a_flag(arguments: tuple[str, ...], grammar: Grammar, tmp_path: Path) -> None:
    path = tmp_path / "grammar"
    path.write_text("text of the file")
    assert request(*(str(path) if each == "FILE" else each for each in arguments))[0].grammar == grammar


@pytest.mark.parametrize(
    ("arguments", "flag", "limit"),
    [
        (("--frequency-penalty", "3"), "--frequency-penalty", "[-2, 2]"),
        (("--logit-bias", "5=101"), "--logit-bias", "[-100, 100]"),
        (("--logit-bias", "5"), "--logit-bias", "TOKEN=NUMBER"),
        (("--logit-bias", "x=5"), "--logit-bias", "TOKEN=NUMBER"),
        (("--allowed-token-ids", "1,,2"), "--allowed-token-ids", "commas"),
        (("--bad-word", ""), "--bad-word", "not empty"),
        (("--stop-token-id", "-1"), "--stop-token-id", "an integer from 0"),
        (("--min-tokens", "200"), "--min-tokens", "at most max_tokens, 128"),
        (("--timeout", "0"), "--timeout", "above 0, up to 604800"),
        (("--tenant", "t" * 129), "--tenant", "128 characters"),
        (("--salt", "s" * 65), "--salt", "64 bytes"),
        (("--retention", "16"), "--retention", "TOKENS=PRIORITY"),
        (("--retention", "16=10"), "--retention", "from 1 to 9"),
        (("--retention", "16=9:0"), "--retention", "more than 0"),
        (("--expected-back", "-1"), "--expected-back", "from 0 to"),
        (("--cache-use", "read"), "--cache-use", "write-only"),
        (("--json-object", "--ignore-eos"), "--ignore-eos", "False with a grammar"),
        (("--regex", "a", "--min-tokens", "1"), "--regex", "beside min_tokens"),
        (("--choice", "\udc80"), "--choice", "surrogates"),
        (("--json-schema", "/nowhere"), "--json-schema", "can't be read"),
    ],
)
def test_a_wrong_value_names_its_flag_and_the_limit(arguments: tuple[str, ...], flag: str, limit: str) -> None:
    said = refusal(*arguments).format_message()
    assert f"'{flag}'" in said
    assert limit in said


def test_one_grammar_at_most() -> None:
    with pytest.raises(click.UsageError, match="--regex and --choice"):
        request("--regex", "a", "--choice", "b")
