"""Compare a plan on the GPU with the simulator, on the same random buffers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusec.gpu.backend import CudnnBackend
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnGraph, CudnnTensor
from fusec.lowering.simulator import Buffer, extent, simulate


@dataclass(frozen=True)
class Comparison:
    """Relative L2 error of the worst output between GPU and simulator; NaN if either is not finite.

    untouched: output elements that the GPU did not write
    """

    error: float
    untouched: int


def random_buffers(graph: CudnnGraph, rng: np.random.Generator) -> dict[int, Buffer]:
    """Draw normal numbers (small integers, booleans) for the inputs; outputs are poisoned."""
    buffers = {t.uid: _random(t, rng) for t in graph.inputs}
    for tensor in graph.outputs:
        poison = np.nan if tensor.dtype.is_float else 77
        buffers[tensor.uid] = np.full(extent(tensor), poison, tensor.dtype.numpy)
    return buffers


def _random(tensor: CudnnTensor, rng: np.random.Generator) -> Buffer:
    size = extent(tensor)
    if tensor.dtype is DType.BOOL:
        return rng.random(size) < 0.5
    if tensor.dtype.is_int:
        return rng.integers(-9, 9, size).astype(tensor.dtype.numpy)
    # Filters have unit gain, because results of 16 bits would overflow for deep sums.
    scale = 1.0 / np.sqrt(max(1, np.prod(tensor.dims[1:]))) if len(tensor.dims) >= 4 and tensor.dims[0] > 1 else 1.0
    return (rng.standard_normal(size) * scale).astype(tensor.dtype.numpy)


def compare(backend: CudnnBackend, graph: CudnnGraph, rng: np.random.Generator) -> Comparison:
    """Run the backend's plan of a graph and the simulator, and compare the outputs."""
    host = random_buffers(graph, rng)
    device = {uid: buffer.copy() for uid, buffer in host.items()}
    backend.run_on_host(graph, device)
    simulate(graph, host)
    worst, untouched = 0.0, 0
    for tensor in graph.outputs:
        got, want = device[tensor.uid].astype(np.float64), host[tensor.uid].astype(np.float64)
        if tensor.dtype is DType.I8 and np.count_nonzero(np.abs(got - want) == 1) <= 1 + got.size / 64:
            got = np.where(np.abs(got - want) == 1, want, got)  # rounded from next to a tie: see diagnostics.verify
        written = np.isfinite(want)
        untouched += int((~np.isfinite(got) & written).sum())
        scale = float(np.linalg.norm(want[written]))
        error = float(np.linalg.norm((got - want)[written])) / (scale or 1.0)
        worst = error if not error <= worst else worst  # NaN stays
    return Comparison(worst, untouched)
