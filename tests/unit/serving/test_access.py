"""Authorization: the token file, evidence, roles, and a table for every method of every service."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import sha256

from quire.cache.v1 import cache_service_pb2
from quire.cachemgr.service import roles as cache_roles
from quire.client.credentials import Credentials
from quire.client.errors import CredentialsUnusable
from quire.compute.v1 import worker_service_pb2
from quire.serving.access import (
    ANYBODY,
    EVERY_ROLE,
    Access,
    Evidence,
    Identity,
    Role,
    caller,
    certificate_name,
    digest_of,
    evidence_of,
    is_open,
    read_token_file,
)
from quire.serving.errors import ErrorStatus
from quire.serving.watched import MAX_FILE_BYTES, FileError, read_bytes
from quire.worker.service import roles as worker_roles

CLIENT, WORKER, OPERATOR = (frozenset({role}) for role in (Role.CLIENT, Role.WORKER, Role.OPERATOR))
METHODS = {"/a.A/Lease": CLIENT, "/a.A/Attach": WORKER, "/a.A/Look": CLIENT | OPERATOR}
DOMAIN = "a.quire.dev"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def with_token(token: str) -> Evidence:
    return Evidence(shows_token=True, token_digest=digest_of(token))


def reason(decision: Identity | ErrorStatus) -> str:
    assert isinstance(decision, ErrorStatus)
    assert decision.domain == DOMAIN
    return decision.reason


def test_a_token_file_is_read(path: Path) -> None:
    path.write_text(
        f"# who may call\n\nalice client {sha256('a')}  # her laptop\nalice operator,client {sha256('b').upper()}\n"
        "spiffe://quire/worker-1 worker cert\n* client cert\n"
    )
    file = read_token_file(path)
    assert file.by_token(digest_of("a")) == Identity("alice", CLIENT)
    assert file.by_token(digest_of("b")) == Identity("alice", CLIENT | OPERATOR)
    assert file.by_token(digest_of("c")) is None
    assert file.by_certificate("spiffe://quire/worker-1") == Identity("spiffe://quire/worker-1", WORKER)
    assert file.by_certificate("anybody") == Identity("anybody", CLIENT)


def test_a_certificate_without_a_line_has_no_role(path: Path) -> None:
    path.write_text("bob worker cert\n")
    assert read_token_file(path).by_certificate("alice") == Identity("alice", frozenset())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the file is empty"),
        ("alice client", ":1: 2 words"),
        (f"# x\nalice client {sha256('a')} more", ":2: 4 words"),
        (f"alice boss {sha256('a')}", "roles must be some of client,worker,operator"),
        (f"alice client, {sha256('a')}", "roles must be"),
        ("alice client TheSecretItself", "64 hex digits"),
        (f"alice client {sha256('a')[:-1]}", "64 hex digits"),
        (f"alice client {sha256('a')}\nbob worker {sha256('a')}", "two lines for one token"),
        ("alice client cert\nalice worker cert", ":2: a second line"),
    ],
)
def test_a_wrong_token_file_is_refused_and_not_quoted(path: Path, text: str, complaint: str) -> None:
    path.write_text(text)
    with pytest.raises(FileError, match=complaint) as refused:
        read_token_file(path)
    assert str(path) in str(refused.value)
    assert "TheSecretItself" not in str(refused.value)
    assert sha256("a")[:-1] not in str(refused.value)


def test_a_file_that_is_not_text_is_refused(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="not UTF-8"):
        read_token_file(path)


def test_tokens_are_compared_in_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(f"a client {sha256('a')}\nb client {sha256('b')}\n")
    compared: list[bytes] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert read_token_file(path).by_token(digest_of("a")) == Identity("a", CLIENT)
    assert compared == [digest_of("a"), digest_of("b")]  # also those behind the one that fits


def test_nothing_secret_is_in_a_repr(path: Path) -> None:
    path.write_text(f"a client {sha256('a')}\n")
    assert digest_of("a").hex() not in repr(read_token_file(path)) + repr(with_token("a"))
    assert repr(digest_of("a")) not in repr(read_token_file(path)) + repr(with_token("a"))


def test_roles_decide(path: Path) -> None:
    path.write_text(f"alice client {sha256('a')}\nwanda worker {sha256('w')}\nolga operator {sha256('o')}\n")
    access = Access(METHODS, token_file=path, domain=DOMAIN)
    allowed = {
        (token, method)
        for token in "awo"
        for method in (*METHODS, "/a.A/Unlisted")
        if isinstance(access.decide(method, with_token(token)), Identity)
    }
    assert allowed == {
        ("a", "/a.A/Lease"),
        ("a", "/a.A/Look"),
        ("w", "/a.A/Attach"),
        ("o", "/a.A/Look"),
        ("o", "/a.A/Unlisted"),
    }
    refused = access.decide("/a.A/Attach", with_token("a"))
    assert isinstance(refused, ErrorStatus)
    assert (refused.code, refused.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING")
    assert refused.metadata == {"method": "/a.A/Attach", "roles": "worker", "name": "alice"}


def test_who_shows_nothing_or_something_unknown_is_refused(path: Path) -> None:
    path.write_text(f"alice client {sha256('a')}\nalice client cert\n")
    access = Access(METHODS, token_file=path, domain=DOMAIN)
    assert reason(access.decide("/a.A/Lease", Evidence())) == "CREDENTIALS_MISSING"
    assert reason(access.decide("/a.A/Lease", with_token("z"))) == "TOKEN_REJECTED"
    assert reason(access.decide("/a.A/Lease", Evidence(shows_token=True))) == "TOKEN_REJECTED"
    # A token decides, also beside a certificate that would do.
    beside = Evidence(shows_token=True, token_digest=digest_of("z"), certificate_name="alice")
    assert reason(access.decide("/a.A/Lease", beside)) == "TOKEN_REJECTED"
    assert access.decide("/a.A/Lease", Evidence(certificate_name="alice")) == Identity("alice", CLIENT)


def test_without_a_token_file_a_certificate_is_a_client() -> None:
    access = Access(METHODS, token_file=None, domain=DOMAIN)
    assert access.decide("/a.A/Lease", Evidence(certificate_name="alice")) == Identity("alice", CLIENT)
    assert reason(access.decide("/a.A/Attach", Evidence(certificate_name="alice"))) == "ROLE_MISSING"
    assert reason(access.decide("/a.A/Lease", with_token("a"))) == "TOKEN_REJECTED"


def test_a_changed_token_file_counts_from_the_next_call_on(path: Path) -> None:
    path.write_text(f"alice client {sha256('a')}\n")
    access = Access(METHODS, token_file=path, domain=DOMAIN)
    assert access.decide("/a.A/Lease", with_token("a")) == Identity("alice", CLIENT)
    path.write_text(f"alice client {sha256('b')}\n")  # of the same size, within one tick of the clock
    assert reason(access.decide("/a.A/Lease", with_token("a"))) == "TOKEN_REJECTED"
    assert access.decide("/a.A/Lease", with_token("b")) == Identity("alice", CLIENT)


@pytest.mark.parametrize("broken", ["", "alice client", None], ids=["empty", "half a line", "gone"])
def test_a_broken_token_file_changes_nothing(path: Path, broken: str | None, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text(f"alice client {sha256('a')}\n")
    access = Access(METHODS, token_file=path, domain=DOMAIN)
    path.unlink() if broken is None else path.write_text(broken)
    for _ in range(3):
        assert access.decide("/a.A/Lease", with_token("a")) == Identity("alice", CLIENT)
    (line,) = caplog.messages
    assert "token file not reloaded, the one before stays" in line
    assert str(path) in line
    path.write_text("nobody client cert\n")
    assert reason(access.decide("/a.A/Lease", with_token("a"))) == "TOKEN_REJECTED"


class Call:
    """The caller's credentials in a handler's context."""

    def __init__(self, metadata: tuple[tuple[str, str], ...], **auth: bytes) -> None:
        self._metadata = metadata
        self._auth = {key: [value] for key, value in auth.items()}

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def auth_context(self) -> Mapping[str, Any]:
        return self._auth


@pytest.mark.parametrize(
    ("values", "token"),
    [
        (["Bearer abc"], "abc"),
        (["bearer  abc "], "abc"),
        (["abc"], None),
        (["Basic abc"], None),
        (["Bearer a b"], None),
        (["Bearer "], None),
        (["Bearer a", "Bearer b"], None),
    ],
)
def test_the_authorization_is_one_bearer_token(values: list[str], token: str | None) -> None:
    call: Any = Call(tuple(("authorization", value) for value in values), peer_uri=b"a:b")
    digest = None if token is None else digest_of(token)
    assert evidence_of(call) == Evidence(shows_token=True, token_digest=digest)


def test_without_an_authorization_it_is_the_certificate() -> None:
    call: Any = Call((("other", "x"),), peer_dns=b"alice.example")
    assert evidence_of(call) == Evidence(certificate_name="alice.example")
    plain: Any = Call(())
    assert evidence_of(plain) == Evidence()


def test_the_name_of_a_certificate() -> None:
    names = {"peer_uri": [b"spiffe://a/b", b"c:d"], "peer_dns": [b"e.example"], "x509_common_name": [b"f"]}
    assert certificate_name(names) == "spiffe://a/b"
    del names["peer_uri"]
    assert certificate_name(names) == "e.example"
    del names["peer_dns"]
    assert certificate_name(names) == "f"
    assert certificate_name({"x509_common_name": [b""]}) is None
    assert certificate_name({"transport_security_type": [b"ssl"]}) is None


@pytest.mark.parametrize(
    ("descriptor", "table"),
    [
        (cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"], cache_roles.ROLES),
        (worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"], worker_roles.ROLES),
    ],
    ids=["cachemgr", "worker"],
)
def test_every_method_of_every_service_has_roles(descriptor: Any, table: Mapping[str, Any]) -> None:
    assert set(table) == {f"/{descriptor.full_name}/{method.name}" for method in descriptor.methods}
    assert all(roles and roles <= EVERY_ROLE for roles in table.values())
    assert not any(is_open(method) for method in table)


def test_only_the_worker_may_attach_and_does_nothing_else() -> None:
    for table in (cache_roles.ROLES, worker_roles.ROLES):
        assert {method.rpartition("/")[2] for method, roles in table.items() if Role.WORKER in roles} <= {"AttachPool"}
    assert cache_roles.ROLES["/quire.cache.v1.CacheService/AttachPool"] == WORKER


def test_who_is_not_asked_is_anybody() -> None:
    assert caller() is ANYBODY
    assert caller().roles == EVERY_ROLE


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("/grpc.health.v1.Health/Check", True),
        ("/grpc.health.v1.Health/Watch", True),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True),
        ("/grpc.health.v1.HealthX/Check", False),
        ("/quire.cache.v1.CacheService/GetPool", False),
        ("", False),
    ],
)
def test_health_and_reflection_are_open(method: str, expected: bool) -> None:
    assert is_open(method) is expected


# -- what is no file -----------------------------------------------------------------------------------------------


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_too_large(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (make_fifo, "not a regular file"),
        (Path.mkdir, "Is a directory"),
        (make_too_large, f"the file has more than {MAX_FILE_BYTES} bytes"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    ],
    ids=["fifo", "directory", "too large", "device", "loop"],
)
def test_what_is_no_file_that_can_be_read_whole_is_told_at_once(
    make: Callable[[Path], object], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "given"
    make(path)
    with pytest.raises(FileError) as caught:
        read_bytes(path)
    assert str(caught.value) == f"{path}: {told}"
    if make is not make_too_large:
        with pytest.raises(CredentialsUnusable, match=told):
            Credentials(token_file=path).open_channel("unix:/nowhere", ())


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    """As in a volume of Kubernetes."""
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_bytes(tmp_path / "link") == b"content"
    with pytest.raises(FileError, match="Too many levels"):
        read_bytes(tmp_path / "link", os.O_NOFOLLOW)
