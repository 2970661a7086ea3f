"""Test that the figures of the GPU that kernels are shaped for come from its target."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusec.gpu.kernels import GpuFigures
from fusec.gpu.kernels.codegen import gpu_figures
from fusec.targets.target import load, names


def test_the_h200_keeps_its_figures() -> None:
    """Kernels were measured with these, and their generated source depends on them."""
    figures = GpuFigures.of(load("h200"))
    assert (figures.sm, figures.processors, figures.processor_threads) == (90, 132, 2048)
    assert (figures.static_bytes, figures.shared_bytes, figures.dynamic_bytes) == (48 << 10, 227 << 10, 224 << 10)
    assert figures.resident_cache_bytes == 24 << 20
    assert (figures.enough_blocks, figures.enough_threads, figures.intensity) == (128, 1 << 17, 170)


@pytest.mark.parametrize("name", names())
def test_each_target_has_its_own(name: str) -> None:
    target = load(name)
    figures = GpuFigures.of(target)
    assert (figures.sm, figures.processors) == (target.sm, target.processors)
    assert (figures.shared_bytes, figures.cache_bytes) == (target.shared_memory_bytes, target.l2_bytes)
    assert 0 < figures.static_bytes < figures.dynamic_bytes < figures.shared_bytes


@pytest.mark.parametrize(
    ("name", "blocks", "threads"),
    [("t4", 32, 1 << 14), ("l4", 32, 1 << 15), ("a100", 64, 1 << 16), ("b200", 128, 1 << 17)],
)
def test_what_fills_a_gpu_follows_its_multiprocessors(name: str, blocks: int, threads: int) -> None:
    figures = GpuFigures.of(load(name))
    assert (figures.enough_blocks, figures.enough_threads) == (blocks, threads)


@pytest.mark.parametrize(
    ("name", "architecture", "has"),
    [
        ("t4", "", True),
        ("l4", "sm_90", False),
        ("h100", "sm_90", True),
        ("b200", "sm_90", True),
        ("h200", "sm_90a", True),
        ("b200", "sm_90a", False),
        ("a100", "sm_90a", False),
    ],
)
def test_instructions_of_an_architecture(name: str, architecture: str, has: bool) -> None:
    assert GpuFigures.of(load(name)).has(architecture) is has


def test_no_kernel_counts_the_multiprocessors_itself() -> None:
    folder = Path(gpu_figures.__file__).parents[1]
    blocks = [str(load("h200").processors * n) for n in (1, 2, 4, 8)]
    for file in folder.rglob("*.py"):
        words = file.read_text(encoding="utf-8").replace(",", " ").replace(")", " ").split()
        assert not set(blocks).intersection(words), f"{file.name}: use the figures"
        assert "targets.target" not in file.read_text(encoding="utf-8") or file.name == "gpu_figures.py"
