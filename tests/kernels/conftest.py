"""Kernels run compiled where there is a GPU, and otherwise only in Triton's interpreter, in a process of their own:

    TRITON_INTERPRET=1 python -m pytest tests/kernels

Triton reads the variable when it is imported, so the other tests can't share that process. Without a GPU and without
the variable only what compiles and runs nothing is collected, and under the variable all but that.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRET:
    import fast_interpreter

    fast_interpreter.install()
COMPILE_ONLY = {"test_dependent_launch.py", "test_machine_code.py", "test_skinny_machine_code.py"}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if not collection_path.name.startswith("test_"):
        return None
    if collection_path.name in COMPILE_ONLY:
        return True if INTERPRET else None
    return None if INTERPRET or torch.cuda.is_available() else True


def pytest_report_header() -> str | None:
    if INTERPRET:
        return "kernels: in Triton's interpreter"
    return None if torch.cuda.is_available() else "kernels: no GPU and no TRITON_INTERPRET=1: compiled, not run"


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not INTERPRET and not torch.cuda.is_available():
        pytest.skip("no GPU and no TRITON_INTERPRET=1")  # a file that is named is collected all the same
    return torch.device("cpu" if INTERPRET else "cuda")


@contextmanager
def few_multiprocessors() -> Iterator[None]:
    from quire.kernels import launching  # Triton only where kernels run

    with launching.chosen_for(replace(launching.DEFAULT_LIMITS, num_multiprocessors=2)):
        yield


@pytest.fixture
def small_device() -> Iterator[None]:
    """Make plans for few programs: in the interpreter each of them takes its time."""
    with few_multiprocessors():
        yield


@pytest.fixture(scope="module")
def model(device: torch.device) -> Any:
    """A PagedModel: a Llama of one layer, with attention in Triton."""
    import model_zoo
    from gpu_desk.steps import MAX_MODEL_LEN

    from quire.worker.attention.triton_attention import TritonAttentionStep
    from quire.worker.model.preparing import prepare_model

    llama = model_zoo.one_layer_llama(max_position_embeddings=MAX_MODEL_LEN).to(device)
    with few_multiprocessors():
        return prepare_model(llama, max_model_len=MAX_MODEL_LEN, step_kind=TritonAttentionStep)
