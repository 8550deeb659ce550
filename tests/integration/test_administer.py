"""The thin client's calls about prefixes and pins, and the administrators' commands, over real services."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result

from quire.cache.v1 import cache_service_pb2 as pb
from quire.cli.commands import quire
from quire.cli.launch import LocalServices
from quire.client import LLM, CacheClient, InvalidRequest, NotFound

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
TEXT = "The input tensor has the same shape as the output tensor, and the same dtype. "
Answer = TypeVar("Answer")


@pytest.fixture(scope="module")
def cachemgr() -> Iterator[str]:
    """Services with PROMPT, and nothing else, in the prefix cache."""
    with LocalServices.start(model=MODEL, num_blocks=128) as services:
        with LLM(services.cachemgr_address) as llm:
            llm.generate([PROMPT], max_tokens=1, ignore_eos=True)
        yield services.cachemgr_address


PROMPT = list(range(1, 41))  # two full blocks of 16, and half of one


def ask(cachemgr: str, question: Callable[[CacheClient], Awaitable[Answer]]) -> Answer:
    async def run() -> Answer:
        cache = CacheClient(cachemgr)
        try:
            return await question(cache)
        finally:
            await cache.close()

    return asyncio.run(run())


def run(cachemgr: str, *arguments: str) -> Result:
    return CliRunner().invoke(quire, [*arguments, "--cachemgr", cachemgr])


def as_json(cachemgr: str, *arguments: str) -> Any:
    done = run(cachemgr, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def test_a_prefix_is_looked_up_and_explained(cachemgr: str) -> None:
    (match,) = ask(cachemgr, lambda cache: cache.lookup_prefix(PROMPT)).matches
    assert match.cached_token_count == 32
    other = ask(cachemgr, lambda cache: cache.explain_prefix(PROMPT, salt=b"s"))
    assert other.reason == pb.MISS_REASON_OTHER_SALT
    unknown = ask(cachemgr, lambda cache: cache.explain_prefix([7] * 40))
    assert (unknown.reason, unknown.missing_block_index) == (pb.MISS_REASON_NEVER_COMPUTED, 0)
    with pytest.raises(NotFound):
        ask(cachemgr, lambda cache: cache.explain_prefix(PROMPT, pool="none"))
    with pytest.raises(InvalidRequest):
        ask(cachemgr, lambda cache: cache.explain_prefix([]))


def test_an_admission_is_checked_with_its_reservation(cachemgr: str) -> None:
    def check(**fields: Any) -> pb.AdmissionCheck:
        admission = pb.Admission(token_ids=PROMPT, **fields)
        (found,) = ask(cachemgr, lambda cache: cache.check_admission(admission))
        return found

    assert check().accepted
    assert check().cached_token_count == 32
    assert check(salt=b"s").cached_token_count == 0
    assert check(reserved_token_count=160).needed_block_count > check().needed_block_count
    (held,) = ask(cachemgr, lambda cache: cache.check_admission(pb.Admission(token_ids=PROMPT), reserve_blocks=127))
    assert not held.accepted


def test_a_pin_is_made_listed_and_removed(cachemgr: str) -> None:
    made = ask(cachemgr, lambda cache: cache.pin_prefix(PROMPT, ttl_s=60))
    assert made.pinned_token_count == 32
    assert [pin.pin_id for pin in ask(cachemgr, lambda cache: cache.list_pins())] == [made.pin_id]
    for _ in range(2):  # one that is gone is fine
        ask(cachemgr, lambda cache: cache.unpin_prefix(made.pin_id))
    assert not ask(cachemgr, lambda cache: cache.list_pins())
    with pytest.raises(NotFound):
        ask(cachemgr, lambda cache: cache.pin_prefix([7] * 40))
    with pytest.raises(InvalidRequest):
        ask(cachemgr, lambda cache: cache.pin_prefix(PROMPT, ttl_s=0.5))


def test_the_tenants_of_a_pool_are_listed(cachemgr: str) -> None:
    assert len(ask(cachemgr, lambda cache: cache.list_tenants())) == 1


def test_the_commands_about_a_prefix(cachemgr: str) -> None:
    tokens = ("--token-ids", ids(PROMPT))
    assert as_json(cachemgr, "lookup", *tokens)["matches"][0]["cached_token_count"] == 32
    assert as_json(cachemgr, "explain", *tokens, "--salt", "s")["reason"] == "MISS_REASON_OTHER_SALT"
    assert "never computed" in run(cachemgr, "explain", TEXT).stdout
    assert "none: the prompt has no full block" in run(cachemgr, "explain", "--token-ids", "1,2").stdout
    pin_id = as_json(cachemgr, "pin", *tokens, "--ttl", "60")["pin_id"]
    of_other = ("--tenant", "other")
    assert as_json(cachemgr, "lookup", *tokens, *of_other)["matches"][0]["cached_token_count"] == 0
    assert as_json(cachemgr, "explain", *tokens, *of_other)["reason"] == "MISS_REASON_OTHER_TENANT"
    assert "PREFIX_NOT_CACHED" in run(cachemgr, "pin", *tokens, *of_other).output
    assert run(cachemgr, "pin", *of_other).stdout == "There are no pins.\n"
    assert run(cachemgr, "pin", "--remove", pin_id, *of_other).exit_code == 0
    assert pin_id in run(cachemgr, "pin").stdout
    assert run(cachemgr, "pin", "--remove", pin_id).exit_code == 0
    assert run(cachemgr, "pin").stdout == "There are no pins.\n"


@pytest.mark.parametrize("command", ["lookup", "explain"])
def test_a_prompt_longer_than_the_pool_is_answered_and_can_never_be_admitted(cachemgr: str, command: str) -> None:
    longest = PROMPT[:32] + [7] * 5000
    if command == "lookup":
        assert as_json(cachemgr, "lookup", "--token-ids", ids(longest))["matches"][0]["cached_token_count"] == 32
    else:
        assert as_json(cachemgr, "explain", "--token-ids", ids(longest))["missing_block_index"] == 2
    said = run(cachemgr, command, "--token-ids", ids(longest))
    assert said.exit_code == 0
    limit = re.findall(r"default: the prompt has 5032 tokens, and a sequence at most (\d+): it can never", said.stdout)
    assert len(limit) == 1
    fits = run(cachemgr, command, "--token-ids", ids(longest[: int(limit[0])]))
    assert "never be admitted" not in fits.stdout


def test_a_lookup_says_why_nothing_is_found(cachemgr: str) -> None:
    short = run(cachemgr, "lookup", "--token-ids", "1,2").stdout
    assert "Only full blocks of 16 tokens are cached, and the prompt has 2 tokens." in short
    assert "`quire explain` shows why nothing" in run(cachemgr, "lookup", TEXT).stdout
    assert len(run(cachemgr, "lookup", "--token-ids", ids(PROMPT)).stdout.splitlines()) == 2


def test_tables_are_whole(cachemgr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piped, a row is a line without padding, however narrow the terminal; no value ends in an ellipsis."""
    missing = as_json(cachemgr, "explain", TEXT)["missing_prefix_hash"]
    for columns in ("30", "80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        shown = run(cachemgr, "explain", TEXT).stdout
        assert missing in shown
        assert not re.search(r" $|…", shown, re.M)
    with LLM(cachemgr):
        (row,) = run(cachemgr, "leases").stdout.splitlines()[1:]
    assert len(row) < 80


def test_leases_and_audit(cachemgr: str) -> None:
    assert run(cachemgr, "leases").stdout == "There are no leases.\n"
    with LLM(cachemgr):
        (lease,) = as_json(cachemgr, "leases")["leases"]
        assert lease["state"] == "LEASE_STATE_OPEN"
        assert lease["lease_id_prefix"] in run(cachemgr, "leases").stdout
    audit = run(cachemgr, "audit")
    assert audit.exit_code == 0
    assert audit.stdout.startswith("All invariants hold: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("lookup", "--token-ids", "1,x"), "separated by commas"),
        (("explain", "--token-ids", ""), "PROMPT"),
        (("pin", "text", "--remove", "pin"), "not both"),
        (("pin", "text", "--ttl", "0"), "--ttl"),
        (("audit", "--pool", "none"), "POOL_NOT_FOUND"),
        (("reset", "--token-ids", "1,2,3"), "at least 16 tokens"),
        (("reset", "--token-ids", ""), "at least a full block"),
    ],
)
def test_a_wrong_value_is_named(cachemgr: str, arguments: tuple[str, ...], says: str) -> None:
    done = run(cachemgr, *arguments)
    assert done.exit_code in (1, 2)
    assert says in done.output


@pytest.mark.parametrize(
    "command", [("leases",), ("audit",), ("pin",), ("reset", "--all"), ("lookup", "--token-ids", "1")]
)
def test_a_cachemgr_that_is_away_is_said(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = run(f"unix:{tmp_path}/none.sock", *command)
    assert done.exit_code == 1
    assert "no cachemgr answers" in done.output


def filled(cachemgr: str, *prompts: list[int]) -> None:
    with LLM(cachemgr) as llm:
        llm.generate(prompts, max_tokens=1, ignore_eos=True)


def test_what_begins_with_a_prompt_is_reset_with_its_pins(cachemgr: str) -> None:
    longer, other = [*PROMPT[:32], *range(60, 80)], [*PROMPT[:16], *range(80, 100)]
    filled(cachemgr, longer, other)
    ask(cachemgr, lambda cache: cache.pin_prefix(longer))
    ask(cachemgr, lambda cache: cache.pin_prefix(PROMPT[:16]))
    answer = ask(cachemgr, lambda cache: cache.reset_prefix_cache(token_ids=PROMPT))
    assert (answer.dropped_block_count, answer.dropped_pin_count) == (2, 1)
    cached = [ask(cachemgr, lambda cache: cache.lookup_prefix(p)).matches[0] for p in (PROMPT, longer, other)]  # noqa: B023
    assert [match.cached_token_count for match in cached] == [16, 16, 32]
    assert ask(cachemgr, lambda cache: cache.reset_prefix_cache(salt=b"none")).dropped_block_count == 0
    for wrong, says in (
        ({"token_ids": PROMPT[:15]}, "16"),
        ({"token_ids": []}, "token_ids"),
        ({"salt": b"s" * 65}, "64"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            ask(cachemgr, lambda cache: cache.reset_prefix_cache(**wrong))  # noqa: B023
        assert says in refused.value.message
    assert ask(cachemgr, lambda cache: cache.reset_prefix_cache(salt=b"")).dropped_pin_count == 1
    filled(cachemgr, PROMPT)


def test_the_command_that_resets(cachemgr: str) -> None:
    assert as_json(cachemgr, "reset", "--salt", "none")["dropped_block_count"] == 0
    assert as_json(cachemgr, "reset", "--token-ids", ids(PROMPT[:32]))["dropped_block_count"] == 1
    assert "dropped blocks  1" in run(cachemgr, "reset", "--all").stdout
    for arguments in ((), ("--all", "--salt", "s"), ("--all", "text")):
        done = run(cachemgr, "reset", *arguments)
        assert (done.exit_code, "give a scope to reset" in done.output) == (2, True)
    filled(cachemgr, PROMPT)
