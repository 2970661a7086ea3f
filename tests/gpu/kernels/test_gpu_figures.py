"""The figures of the GPU that kernels are shaped for come from its target file."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from fusec.gpu.kernels.codegen import gpu_figures
from fusec.targets import target


def test_the_h200_keeps_its_figures() -> None:
    """Kernels were measured with these, and their generated source depends on them."""
    assert gpu_figures.PROCESSORS == 132 and gpu_figures.PROCESSOR_THREADS == 2048
    assert (gpu_figures.SHARED_BYTES, gpu_figures.MOST_SHARED_BYTES) == (48 << 10, 224 << 10)
    assert gpu_figures.CACHE_BYTES * 2 // 5 == 24 << 20


def test_the_default_target_comes_first_of_all_sizes() -> None:
    sizes = gpu_figures.target_sizes()
    assert sizes[0] == (gpu_figures.PROCESSORS, gpu_figures.MOST_SHARED_BYTES)
    assert [n for n, _ in sizes] == [132, 108, 58, 40]


def test_another_target_has_other_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with monkeypatch.context() as patch:
            patch.setattr(target, "DEFAULT", "a100")
            assert importlib.reload(gpu_figures).PROCESSORS == 108
    finally:
        importlib.reload(gpu_figures)


def test_no_kernel_counts_the_multiprocessors_itself() -> None:
    folder = Path(gpu_figures.__file__).parents[1]
    blocks = [str(gpu_figures.PROCESSORS * n) for n in (1, 2, 4, 8)]
    for file in folder.rglob("*.py"):
        words = file.read_text(encoding="utf-8").replace(",", " ").replace(")", " ").split()
        assert not set(blocks).intersection(words), f"{file.name}: use PROCESSORS"
