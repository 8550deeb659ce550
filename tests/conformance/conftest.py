"""Foreign programs, and services for them to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.foreign import ROOT, build_grpcurl

from quire.cli.launch import LocalServices


@pytest.fixture(scope="session")
def grpcurl() -> Path:
    """The program, built if it has to be."""
    return build_grpcurl()


@pytest.fixture(scope="session")
def demo_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServices]:
    """Both services with the model that ships here, as docs/how-to/grpcurl.md starts them; nothing in the pool yet."""
    with LocalServices.start(model=ROOT / "deploy/demo/model", num_blocks=32) as services:
        yield services
