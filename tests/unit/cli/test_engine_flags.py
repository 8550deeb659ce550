"""The flags of an engine: every command that has an engine has them, and gives them to it."""

from __future__ import annotations

from typing import Any

import click
import pytest

from quire.cli.commands import generate
from quire.cli.generate import Target
from quire.client import InvalidRequest, SpeculativeConfig
from quire.gateway.__main__ import main as gateway

JSON = '{"method": "suffix", "num_speculative_tokens": 5}'
COMMANDS: dict[str, tuple[click.Command, tuple[str, ...]]] = {"generate": (generate, ("x",)), "serve": (gateway, ())}


def run_generate(*arguments: str, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> Target:
    """Return what `quire generate` asks, and how; with an error it ends with that."""
    given: list[Target] = []

    def run(prompt: str, params: Any, cache: Any, target: Target, **options: Any) -> None:
        given.append(target)
        if error is not None:
            raise error

    monkeypatch.setattr("quire.cli.generate.run_generate", run)
    generate.main(["x", *arguments], standalone_mode=False)
    return given[0]


@pytest.mark.parametrize(("command", "arguments"), COMMANDS.values(), ids=list(COMMANDS))
def test_a_configuration_of_drafts_is_read_and_checked(command: click.Command, arguments: tuple[str, ...]) -> None:
    context = command.make_context("quire", [*arguments, "--speculative-config", JSON])
    assert context.params["speculative_config"] == SpeculativeConfig("suffix", num_speculative_tokens=5)
    for text, message in (
        ('{"method": "eagle3"}', "speculative_config.method is 'eagle3', must be one of ngram, suffix"),
        ('{"num_speculative_tokens": 0}', "speculative_config.num_speculative_tokens is 0, must be an integer from 1"),
        ("ngram", "must be a JSON object"),
    ):
        with pytest.raises(click.BadParameter) as refused:
            command.make_context("quire", [*arguments, "--speculative-config", text])
        assert message in refused.value.message
        assert refused.value.param is not None
        assert refused.value.param.opts == ["--speculative-config"]


def test_generate_has_drafts_as_its_flag_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_generate(monkeypatch=monkeypatch).speculative is None
    expected = SpeculativeConfig("suffix", num_speculative_tokens=5)
    assert run_generate("--speculative-config", JSON, monkeypatch=monkeypatch).speculative == expected


@pytest.mark.parametrize("field", ["speculative_config", "speculative_config.num_speculative_tokens"])
def test_a_refusal_of_the_worker_names_the_flag(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = InvalidRequest.of_field(field, 8, "at most 4, the max_draft_count of the worker")
    with pytest.raises(click.BadParameter, match="8 must be at most 4") as refused:
        run_generate("--speculative-config", JSON, monkeypatch=monkeypatch, error=error)
    assert refused.value.param_hint == "'--speculative-config'"
