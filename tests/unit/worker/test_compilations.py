"""Triton's compilations are counted, and its folder is checked before anything is compiled. Needs no GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from quire.worker.device.compilations import Compilations, check_cache_folder  # noqa: E402


def fill_kernel(out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    tl.store(out_ptr + tl.arange(0, SIZE), 1.0)


def compile_for_sm_90() -> None:
    kernel = triton.JITFunction(fill_kernel)
    source = triton.compiler.ASTSource(kernel, {"out_ptr": "*fp32", "SIZE": "constexpr"}, {"SIZE": 64})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of Triton's, and no listener."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    return tmp_path


def test_kernels_are_counted_and_a_late_one_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    compilations = Compilations()
    compilations.watch()
    compile_for_sm_90()
    statistics = compilations.statistics()
    assert (statistics.num_compiled, statistics.num_read) == (1, 0)
    assert statistics.compile_s > 0
    assert str(statistics).endswith(f"0 read from {folder}")
    assert caplog.text == ""
    compilations.expect_no_more()
    with caplog.at_level(logging.WARNING):
        compile_for_sm_90()
    statistics = compilations.statistics()
    assert (statistics.num_compiled, statistics.num_read) == (1, 1)
    assert "a kernel was read from the cache after the warm-up kernel=fill_kernel" in caplog.text


def test_a_folder_that_can_be_written_to_is_left_as_it_was(folder: Path) -> None:
    check_cache_folder()
    assert list(folder.iterdir()) == []


def test_a_folder_that_can_not_be_made_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "file" / "cache"))
    with pytest.raises(ValueError, match=r"the folder .*/file/cache, .* can't be written to: .*Set TRITON_CACHE_DIR"):
        check_cache_folder()
