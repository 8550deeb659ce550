"""API keys and the limits of their tenants: files, refused and accepted requests."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pages
import pytest

from quire.client import InvalidRequest, RequestFailed, SamplingParams
from quire.gateway.callers import Caller
from quire.gateway.errors import HttpError
from quire.gateway.keys import KeyFile, check_exposure
from quire.gateway.tenant_limits import TenantRateLimiter, read_limits
from quire.serving.addresses import AddressError, parse_listen_address
from quire.serving.watched import FileError

ALICE, BOB = Caller("alice", "alice"), Caller("bob", "bob")
PARAMS = SamplingParams(max_tokens=40)


def write(path: Path, text: str) -> Path:
    """Write a file anew; its stamp differs from that of the one before."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)
    return path


def line(name: str, roles: str, key: str) -> str:
    return f"{name} {roles} {hashlib.sha256(key.encode()).hexdigest()}\n"


def refused(status: int) -> Any:
    class Refused:
        error: HttpError

        def __enter__(self) -> Refused:
            return self

        def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
            assert isinstance(error, HttpError), f"not refused: {error!r}"
            assert error.status == status
            self.error = error
            return True

    return Refused()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def rate_limiter(tmp_path: Path, text: str, **more: Any) -> TenantRateLimiter:
    return TenantRateLimiter(write(tmp_path / "limits.toml", text), **more)


def test_a_key_stands_for_its_tenant(tmp_path: Path) -> None:
    text = line("alice", "client", "one") + line("alice", "client,content", "two") + line("ops", "operator", "three")
    keys = KeyFile(write(tmp_path / "keys", text), priority_of={"alice": 7}.get)  # type: ignore[arg-type]
    assert keys.caller_of("one") == keys.caller_of("two") == Caller("alice", "alice", 7)
    with refused(401) as missing:
        keys.caller_of(None)
    assert missing.error.code == "missing_api_key"
    for wrong in ("four", "", "x" * 5000, "\ud800"):
        with refused(401) as unknown:
            keys.caller_of(wrong)
        assert unknown.error.code == "invalid_api_key"
        assert "four" not in unknown.error.message
    with refused(403):
        keys.caller_of("three")


def test_keys_are_read_again_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", line("alice", "client", "one"))
    keys = KeyFile(path)
    write(path, line("bob", "client", "two"))
    assert keys.caller_of("two").tenant == "bob"
    with refused(401):
        keys.caller_of("one")
    write(path, "bob client not-a-hash\n")
    assert keys.caller_of("two").tenant == "bob"


def test_a_file_of_keys_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"keys:2: .*sha256"):
        KeyFile(write(tmp_path / "keys", line("alice", "client", "one") + "bob client secret\n"))
    with pytest.raises(FileError, match="129 characters"):
        KeyFile(write(tmp_path / "keys", line("a" * 129, "client", "one")))


def test_without_keys_others_do_not_reach_it() -> None:
    local = [parse_listen_address(text) for text in ("127.0.0.1:8000", "[::1]:0", "unix:/tmp/x.sock")]
    open_to_all = [*local, parse_listen_address("0.0.0.0:8000")]
    check_exposure(local, has_keys=False, is_allowed=False)
    check_exposure(open_to_all, has_keys=True, is_allowed=False)
    check_exposure(open_to_all, has_keys=False, is_allowed=True)
    with pytest.raises(AddressError, match="no API keys"):
        check_exposure(open_to_all, has_keys=False, is_allowed=False)


def test_limits_are_by_tenant(tmp_path: Path) -> None:
    text = "[default]\nmax_requests = 2\n[tenants.alice]\nmax_requests = 3\npriority = -4\nweight = 2.5\n"
    table = read_limits(write(tmp_path / "limits.toml", text))
    assert table.of("alice").max_requests == 3
    assert table.of("anybody").max_requests == 2
    assert table.of("alice").priority == -4
    assert table.weights == {"alice": 2.5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[default]\n\nmax_requests = 0\n", r":3: default.max_requests is 0; must be an integer from 1"),
        ("[default]\nmax_requests = true\n", ":2: default.max_requests is True"),
        (
            "[tenants.alice]\nmax_requests = 1\n[tenants.'b c']\nweight = 1001\n",
            ":4: tenants.b c.weight is 1001; must be a",
        ),
        ("[tenants.alice]\nquota = 1\n", ":2: tenants.alice.quota is not known; must be one of max_requests"),
        ("[default]\nweight = 2\n", ":2: default.weight is for tenants by name"),
        ("[tenants.alice]\npriority = 1000001\n", ":2: tenants.alice.priority"),
        ("[tenant.alice]\nweight = 2\n", ":1: tenant is not known; must be default or tenants"),
        ("tenants = 3\n", ":1: tenants must be sections"),
        ("[tenants]\nalice = 3\n", "tenants.alice must be a section"),
        ("[default\n", r"not TOML: .*line 1"),
    ],
)
def test_a_file_of_limits_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(FileError, match=rf"limits\.toml{said}|limits\.toml:.*{said}"):
        rate_limiter(tmp_path, text)


def test_the_limits_of_the_docs_can_be_read(tmp_path: Path) -> None:
    text = pages.block("docs/how-to/routing.md", test="tests/unit/gateway/test_tenant_limits.py").text
    table = read_limits(write(tmp_path / "limits.toml", text))
    assert table.default.tokens_per_minute == 100_000
    assert table.of("alice").weight == 3


def test_requests_in_flight_and_those_that_wait_are_bounded(tmp_path: Path) -> None:
    opened = rate_limiter(tmp_path, "[tenants.alice]\nmax_requests = 2\nmax_queued = 1\n")
    with opened.admit(ALICE, num_prompt_tokens=5, params=PARAMS) as first:
        with refused(429) as queued:
            opened.admit(ALICE, num_prompt_tokens=5, params=PARAMS)
        assert "max_queued" in queued.error.message
        assert queued.error.headers["Retry-After"] == "1"
        assert queued.error.body["error"]["type"] == "rate_limit_error"
        first.generated(1)
        with opened.admit(ALICE, num_prompt_tokens=5, params=PARAMS) as second:
            second.generated(1)
            with refused(429) as in_flight:
                opened.admit(ALICE, num_prompt_tokens=5, params=PARAMS)
            assert "max_requests" in in_flight.error.message
            with opened.admit(BOB, num_prompt_tokens=5, params=PARAMS):
                pass
        with opened.admit(ALICE, num_prompt_tokens=5, params=PARAMS):
            pass
    for _ in range(5):  # a request that ends without a token does not wait for ever
        with opened.admit(ALICE, num_prompt_tokens=5, params=PARAMS):
            pass


def test_tokens_that_were_reserved_and_not_used_are_given_back(tmp_path: Path) -> None:
    clock = Clock()
    opened = rate_limiter(tmp_path, "[tenants.alice]\ntokens_per_minute = 60\n", clock=clock)
    with opened.admit(ALICE, num_prompt_tokens=10, params=PARAMS) as admission:  # reserves 50
        with refused(429) as full:
            opened.admit(ALICE, num_prompt_tokens=10, params=PARAMS)
        assert full.error.retry_after_s == pytest.approx(40)
        admission.generated(5)
    with opened.admit(ALICE, num_prompt_tokens=5, params=PARAMS):  # of the 45 that are left
        pass
    clock.now += 15
    with opened.admit(ALICE, num_prompt_tokens=15, params=PARAMS):  # 40 and 15 more: all of them
        pass
    clock.now += 3600
    with refused(429), opened.admit(ALICE, num_prompt_tokens=20, params=PARAMS):
        opened.admit(ALICE, num_prompt_tokens=1, params=PARAMS)


def test_a_request_larger_than_the_bucket_is_served_and_paid_for(tmp_path: Path) -> None:
    clock = Clock()
    opened = rate_limiter(tmp_path, "[tenants.alice]\ntokens_per_minute = 60\n", clock=clock)
    with opened.admit(ALICE, num_prompt_tokens=100, params=SamplingParams(max_tokens=None)) as admission:
        admission.generated(20)
    with refused(429) as early:
        opened.admit(ALICE, num_prompt_tokens=1, params=SamplingParams(max_tokens=1))
    assert early.error.retry_after_s == pytest.approx(62)
    clock.now += 62.5
    with opened.admit(ALICE, num_prompt_tokens=1, params=SamplingParams(max_tokens=1)):
        pass


@pytest.mark.parametrize(
    ("error", "num_left"),
    [(RequestFailed("no"), 60), (InvalidRequest("no"), 60), (asyncio.CancelledError(), 50), (GeneratorExit(), 50)],
)
def test_a_request_that_failed_costs_nothing_and_a_cancelled_one_its_prompt(
    tmp_path: Path, error: BaseException, num_left: int
) -> None:
    opened = rate_limiter(tmp_path, "[tenants.alice]\ntokens_per_minute = 60\n", clock=Clock())
    with pytest.raises(type(error)), opened.admit(ALICE, num_prompt_tokens=10, params=PARAMS):
        raise error
    opened.admit(ALICE, num_prompt_tokens=num_left - 1, params=SamplingParams(max_tokens=1))
    with refused(429):
        opened.admit(ALICE, num_prompt_tokens=1, params=SamplingParams(max_tokens=1))


def test_samples_of_a_request_are_reserved(tmp_path: Path) -> None:
    opened = rate_limiter(tmp_path, "[tenants.alice]\ntokens_per_minute = 100\n", clock=Clock())
    opened.admit(ALICE, num_prompt_tokens=10, params=SamplingParams(max_tokens=10, n=3))
    opened.admit(ALICE, num_prompt_tokens=59, params=SamplingParams(max_tokens=1))
    with refused(429):
        opened.admit(ALICE, num_prompt_tokens=1, params=SamplingParams(max_tokens=1))


def test_limits_and_weights_are_read_again(tmp_path: Path) -> None:
    told: list[Mapping[str, float]] = []
    path = tmp_path / "limits.toml"
    opened = rate_limiter(tmp_path, "[tenants.alice]\nmax_requests = 1\nweight = 2\n", set_weights=told.append)
    with opened.admit(ALICE, num_prompt_tokens=1, params=PARAMS):
        write(path, "[tenants.alice]\nmax_requests = 2\nweight = 3\npriority = 5\n")
        with opened.admit(ALICE, num_prompt_tokens=1, params=PARAMS), refused(429):
            opened.admit(ALICE, num_prompt_tokens=1, params=PARAMS)  # the first one still counts
    assert opened.priority_of("alice") == 5
    write(path, "[tenants.alice]\nmax_requests = 9\nweight = 3\n")
    assert opened.priority_of("alice") == 0
    assert told == [{"alice": 2}, {"alice": 3}]
