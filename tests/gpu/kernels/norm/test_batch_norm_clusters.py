"""Kernels of batch norm whose blocks exchange sums within clusters, through the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, assert_same
from gpu.kernels.emulator import Emulator, needs_compiler
from gpu.kernels.norm.test_batch_norm import (
    F16,
    F32,
    F64,
    backward,
    bit_masks,
    build,
    forward,
    keeping,
    last,
    long_channels,
    positive,
    rows,
    surrounded_channels,
)

from fusec.gpu.kernels.norm import batch_norm as family
from fusec.gpu.kernels.norm import batch_norm_streamed as streamed


def has_clusters(channels: int, rows_of: int, **figures: int) -> bool:
    """Tell if the norm of an image has a kernel with clusters. rows_of: pixels of the image."""
    x, p = last(F16, 1, channels, rows_of, 8), rows(F32, channels)
    case = replace(build("norm", [x, p, p], forward), figures=replace(FIGURES, **figures))
    assert case.kernel is not None
    return any("clustered" in way.key for way in case.kernel.others)


@needs_compiler
@pytest.mark.parametrize("kept", [1 << 20, 12000])
def test_blocks_of_a_cluster_exchange_sums(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """All turns stay in shared memory, or some of them are copied again."""
    monkeypatch.setattr(family, "THREADS", (64,))
    monkeypatch.setattr(streamed, "BYTES_AHEAD", 4000)
    x, p = last(F32, 4, 24, 20, 33), rows(F32, 24)
    cases = [*surrounded_channels(), *long_channels(), *bit_masks()]
    cases += [build("fp32", [x, p, p], forward, positive), build("fp32 back", [x, x, p, p, p], backward, positive)]
    cases = [replace(case, figures=replace(keeping(kept), processors=16)) for case in cases]
    ways = [(case, way) for case in cases if case.kernel for way in case.kernel.others if "clustered" in way.key]
    assert len(ways) >= 8
    assert all(way.launches[0].cluster == 8 and not way.launches[0].cooperative for _, way in ways)
    assert any("if (ahead >=" in way.launches[0].source for _, way in ways) is (kept < 1 << 20)
    emulator = Emulator([way for _, way in ways])
    for case, way in ways:
        arrays = case.arrays(rng)
        assert_same(case, emulator.run(way, arrays, case.outputs), case.reference(arrays))


def test_clusters_have_to_fill_the_gpu() -> None:
    assert has_clusters(256, 400)
    assert not has_clusters(256, 400, sm=80)  # which has no clusters
    assert not has_clusters(256, 400, processors=4)
    assert not has_clusters(128, 400)  # its blocks would read 16 bytes at a time
    assert not has_clusters(256, 100)  # too few rows for the threads of a cluster
    assert not has_clusters(192, 400)  # of 132 multiprocessors, 96 would have work


def test_sums_of_64_bits_are_not_sent() -> None:
    x, p = last(F64, 4, 256, 64, 64), rows(F64, 256)
    case = replace(build("norm", [x, p, p], forward), figures=FIGURES)
    assert case.kernel is not None and not any("clustered" in way.key for way in case.kernel.others)
