"""Certificates, plain text and tokens, without a server: refusals and their messages, and files read again."""

from __future__ import annotations

import datetime
import os
import stat
from pathlib import Path

import pytest
from certificates import Authority, Pair, sha256
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from quire.cli.token import PREFIX, run_token
from quire.client.credentials import Credentials
from quire.client.errors import CredentialsUnusable, InvalidRequest
from quire.serving.addresses import AddressError, TcpAddress, UnixAddress, is_local, parse_listen_address
from quire.serving.dialing import Dialer, DialOptions, read_token
from quire.serving.security import Security, SecurityOptions
from quire.serving.tls import TlsFiles, check_certificate, read_certificate
from quire.serving.watched import FileError, WatchedFiles, read_bytes


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("localhost")


def files(pair: Pair, client_ca: Path | None = None) -> TlsFiles:
    return TlsFiles(pair.cert, pair.key, client_ca)


def complaint(pair: Pair, client_ca: Path | None = None) -> str:
    with pytest.raises(FileError) as refused:
        read_certificate(files(pair, client_ca))
    return str(refused.value)


def test_a_good_certificate_is_read(authority: Authority, pair: Pair) -> None:
    read = read_certificate(files(pair, authority.path))
    assert read.cert_pem == pair.cert.read_bytes()
    assert read.key_pem == pair.key.read_bytes()
    assert read.client_ca_pem == authority.path.read_bytes()
    assert str(read.key_pem) not in repr(read)


@pytest.mark.parametrize("days", [1, 400])
def test_when_a_certificate_expires_is_known(authority: Authority, days: int) -> None:
    pair = authority.issue("localhost", days=days)
    own, *_ = x509.load_pem_x509_certificates(pair.cert.read_bytes())
    expires_at_s = own.not_valid_after_utc.timestamp()
    assert {check_certificate(pair.cert, pair.key, is_server=is_server) for is_server in (True, False)} == {
        expires_at_s
    }
    assert read_certificate(files(pair)).expires_at_s == expires_at_s


@pytest.mark.parametrize("is_server", [True, False], ids=["server", "client"])
def test_an_expired_certificate_is_refused(authority: Authority, is_server: bool) -> None:
    expired = authority.issue("localhost", days=-1)
    with pytest.raises(FileError, match=f"{expired.cert}: certificate has expired"):
        check_certificate(expired.cert, expired.key, is_server=is_server)


def test_a_certificate_for_clients_only_serves_nobody(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "a")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_day(-1))
        .not_valid_after(_day(1))
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pair = Pair(tmp_path / "a.pem", tmp_path / "a.key")
    pair.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    check_certificate(pair.cert, pair.key, is_server=False)
    assert "purpose" in complaint(pair)


def test_a_key_of_another_certificate_is_refused(authority: Authority, pair: Pair) -> None:
    other = authority.issue("localhost")
    assert complaint(Pair(pair.cert, other.key)) == f"{other.key}: not the key of the certificate in {pair.cert}"


def test_files_that_are_something_else_are_named(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    junk, empty, missing = tmp_path / "junk", tmp_path / "empty", tmp_path / "missing"
    junk.write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    empty.touch()
    assert complaint(Pair(junk, pair.key)) == f"{junk}: not a certificate (PEM)"
    assert complaint(Pair(pair.key, pair.key)).startswith(f"{pair.key}: no certificate in it")
    assert complaint(Pair(pair.cert, junk)) == f"{junk}: not a private key without a password (PEM)"
    assert complaint(Pair(empty, pair.key)) == f"{empty}: the file is empty"
    assert complaint(Pair(pair.cert, missing)) == f"{missing}: No such file or directory"
    assert complaint(pair, junk) == f"{junk}: no certificate of an authority in it (PEM)"


def test_a_key_with_a_password_is_refused_without_asking_for_it(pair: Pair, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"sesame"),
        )
    )
    assert complaint(Pair(pair.cert, locked)) == f"{locked}: not a private key without a password (PEM)"


def test_watched_files_are_read_only_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    os.utime(path, (1, 1))  # not young any more
    reads = []

    def read() -> bytes:
        reads.append(path)
        return read_bytes(path)

    watched = WatchedFiles("thing", [path, None], read)
    assert [watched.current() for _ in range(3)] == [b"1"] * 3
    assert len(reads) == 1
    (tmp_path / "b").write_text("2")
    os.utime(tmp_path / "b", (1, 1))
    (tmp_path / "b").rename(path)  # of the same size and time
    assert [watched.current() for _ in range(3)] == [b"2"] * 3
    assert len(reads) == 2


def test_a_second_write_within_one_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    watched = WatchedFiles("thing", [path], lambda: read_bytes(path))
    written_ns = path.stat().st_mtime_ns
    path.write_text("2")
    os.utime(path, ns=(written_ns, written_ns))
    assert watched.current() == b"2"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("unix:/run/a.sock", True),
        ("127.0.0.1:1", True),
        ("127.8.9.10:1", True),
        ("[::1]:1", True),
        ("[::ffff:127.0.0.1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("192.0.2.1:1", False),
        ("[::ffff:192.0.2.1]:1", False),
    ],
)
def test_what_is_local(address: str, expected: bool) -> None:
    assert is_local(parse_listen_address(address)) is expected


def test_a_name_of_which_one_address_is_not_loopback_is_not_local(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(2, 1, 6, "", (host, 1)) for host in ("127.0.0.1", "192.0.2.1")]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    assert not is_local(TcpAddress("a", 1))


def test_a_name_that_nobody_knows_is_not_local() -> None:
    with pytest.raises(AddressError, match="no such host"):
        is_local(TcpAddress("a..b", 1))


def test_plain_text_is_refused_unless_it_is_asked_for_by_name(pair: Pair) -> None:
    def security(**options: object) -> Security:
        return Security(SecurityOptions(**options), roles={}, domain="a")  # type: ignore[arg-type]

    everywhere = TcpAddress("0.0.0.0", 1)
    with pytest.raises(AddressError, match=r"--listen 0\.0\.0\.0:1: not loopback.*--allow-plaintext"):
        security().check_plaintext("--listen", everywhere)
    security().check_plaintext("--listen", TcpAddress("127.0.0.1", 1))
    security().check_plaintext("--listen", UnixAddress("/a"))
    security(allow_plaintext=True).check_plaintext("--listen", everywhere)
    security(tls=files(pair)).check_plaintext("--listen", everywhere)


def test_callers_are_asked_only_where_there_is_something_to_ask_for(authority: Authority, pair: Pair) -> None:
    assert not SecurityOptions().asks_who
    assert not SecurityOptions(files(pair)).asks_who
    assert SecurityOptions(files(pair, authority.path)).asks_who
    assert SecurityOptions(token_file=Path("tokens")).asks_who


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("abc\n")
    return tmp_path / "token"


@pytest.mark.parametrize("content", ["", "a b", "a\nb", "\u00e4", "\n"])
def test_a_token_file_of_the_dialing_side_holds_one_word(token_file: Path, content: str) -> None:
    assert read_token(token_file) == "abc"
    token_file.write_text(content)
    with pytest.raises(FileError, match=str(token_file)):
        read_token(token_file)
    with pytest.raises(CredentialsUnusable, match=str(token_file)):
        Credentials(token_file=token_file).open_channel("unix:/a", ())


def test_a_worker_sends_no_token_in_plain_text(authority: Authority, token_file: Path) -> None:
    away, here = TcpAddress("192.0.2.1", 1), UnixAddress("/a")
    with pytest.raises(FileError, match="in plain text"):
        Dialer(away, DialOptions(token_file=token_file))
    assert Dialer(here, DialOptions(token_file=token_file)).metadata() == (("authorization", "Bearer abc"),)
    dialer = Dialer(away, DialOptions(tls_ca=authority.path, token_file=token_file))
    assert dialer.uses_tls
    assert not Dialer(here, DialOptions(tls_ca=authority.path)).uses_tls
    token_file.write_text("def\n")
    assert dialer.metadata() == (("authorization", "Bearer def"),)
    assert Dialer(away, DialOptions()).metadata() == ()


def test_a_certificate_is_checked_before_anybody_dials_with_it(authority: Authority) -> None:
    expired = authority.issue("w", days=-1)
    options = {"tls_ca": authority.path, "tls_cert": expired.cert, "tls_key": expired.key}
    with pytest.raises(FileError, match="certificate has expired"):
        Dialer(TcpAddress("192.0.2.1", 1), DialOptions(**options))
    with pytest.raises(CredentialsUnusable, match="certificate has expired"):
        Credentials(**options).open_channel("192.0.2.1:1", ())


def test_a_client_sends_no_token_in_plain_text(token_file: Path) -> None:
    with pytest.raises(CredentialsUnusable, match="in plain text"):
        Credentials(token_file=token_file).open_channel("192.0.2.1:1", ())
    with pytest.raises(CredentialsUnusable, match="in plain text"):
        Credentials(token="abc").open_channel("192.0.2.1:1", ())
    with pytest.raises(CredentialsUnusable, match="no such host"):
        Credentials(token="abc").open_channel("a..b:1", ())
    with pytest.raises(InvalidRequest, match="'dns:///localhost:1': neither host:port"):
        Credentials(token="abc").open_channel("dns:///localhost:1", ())


def test_credentials_that_make_no_sense_are_refused(authority: Authority, pair: Pair, token_file: Path) -> None:
    for options in (
        {"tls_cert": pair.cert},
        {"tls_cert": pair.cert, "tls_key": pair.key},
        {"tls_server_name": "a"},
        {"token": "a", "token_file": token_file},
    ):
        with pytest.raises(CredentialsUnusable):
            Credentials(**options)  # type: ignore[arg-type]
    other = authority.issue("a")
    mixed = Credentials(tls_ca=authority.path, tls_cert=pair.cert, tls_key=other.key)
    with pytest.raises(CredentialsUnusable, match="not the key of the certificate"):
        mixed.open_channel("localhost:1", ())
    missing = Credentials(tls_ca=authority.path.with_name("missing"))
    with pytest.raises(CredentialsUnusable, match="missing: No such file"):
        missing.open_channel("localhost:1", ())
    assert "secret" not in repr(Credentials(token="secret"))


def test_a_new_token_goes_to_its_file_and_its_hash_to_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "alice.token"
    out.write_text("an old one, readable by all")
    run_token("alice", ("client", "operator"), out)
    token = read_token(out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert token.startswith(PREFIX)
    assert len(token) == len(PREFIX) + 43
    assert capsys.readouterr() == (f"alice client,operator {sha256(token)}\n", "")
    run_token("bob", ("client",), None)
    printed = capsys.readouterr()
    again = printed.err.split()[-1]
    assert printed.out == f"bob client {sha256(again)}\n"
    assert again != token


def _day(offset: int) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=offset)
