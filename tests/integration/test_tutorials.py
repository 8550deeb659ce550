"""The pages of docs/tutorials, followed from beginning to end with real services and the model that ships here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
from conformance.foreign import find
from grpc import insecure_channel
from integration.following import follow, starting
from integration.protocol_client import ask
from pages import ROOT
from ports import free_ports
from samples import others_at_night

from quire.cache.v1 import cache_service_pb2, cache_service_pb2_grpc

THIS = "tests/integration/test_tutorials.py"
UP = "quire up --model deploy/demo/model --num-blocks 64"
# Those that share one pair of services, and leave nothing that another one would see but cached blocks.
SHARING = (
    "docs/tutorials/drive-both-services.md",
    "docs/tutorials/write-a-scheduler.md",
    "docs/tutorials/why-did-my-prefix-miss.md",
)

# Those of `quire lab`, which need no services, and half a minute of processor time and more.
LAB = (
    "docs/tutorials/try-a-router.md",
    "docs/tutorials/try-a-scheduler.md",
    "docs/tutorials/try-an-eviction-policy.md",
)


@pytest.fixture(scope="module")
def services() -> Iterator[Path]:
    """Start what UP starts; the folder in which commands find it."""
    with tempfile.TemporaryDirectory(prefix="q-") as name, starting(UP, ROOT, Path(name)):
        yield Path(name)


@pytest.fixture
def empty(services: Path) -> Path:
    """The same, with nothing in the prefix cache."""
    with insecure_channel(f"unix:{services}/quire/cachemgr.sock") as channel:
        stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        ask(stub.ResetPrefixCache, cache_service_pb2.ResetPrefixCacheRequest())
    return services


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        yield Path(name)


@pytest.mark.parametrize("page", SHARING)
def test_a_tutorial_with_one_pool(page: str, empty: Path, folder: Path) -> None:
    follow(page, test=THIS, folder=folder, services=empty, started=(UP,))


def test_route_by_prefix(folder: Path) -> None:
    (port,) = free_ports(1)
    follow("docs/tutorials/route-by-prefix.md", test=THIS, folder=folder, replaced={"7072": str(port)})


def test_which_pool(folder: Path) -> None:
    follow("docs/tutorials/which-pool.md", test=THIS, folder=folder)


@pytest.mark.parametrize("page", others_at_night(LAB, ["docs/tutorials/try-a-scheduler.md"]))
def test_a_tutorial_in_virtual_time(page: str, folder: Path) -> None:
    follow(page, test=THIS, folder=folder)


def test_tls_and_two_tenants(folder: Path) -> None:
    page = "docs/tutorials/tls-and-two-tenants.md"
    for program in ("openssl", "curl"):
        find(program, for_what=page)
    names = ("7070", "7071", "8443")
    ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
    follow(page, test=THIS, folder=folder, replaced=ports)


def test_the_program_that_drives_both_services_has_50_lines_at_most() -> None:
    program = pages.block("docs/tutorials/drive-both-services.md", test=THIS, language="python")
    assert len(program.text.splitlines()) <= 50
