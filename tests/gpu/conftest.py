"""Tests that need a GPU. Without one the folder is left out, and a line of the report says so."""

import os
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.name.startswith("test_") and not HAS_GPU else None


def pytest_report_header() -> str | None:
    return None if HAS_GPU else "gpu: no GPU, tests/gpu is not run"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda")
