"""Test types of 8 bits and fewer on a stand-in GPU: values are packed bytes, kernels run in the emulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu.kernels.emulator import needs_compiler
from gpu.models.narrow_graphs import DTYPES, GRAPHS, assert_equal, embedding, moves
from gpu.stand_in_gpu import Array, Machine, on_device

from fusec import driver
from fusec.compiler.choose_target import require_runs_on_gpu
from fusec.errors import ExecutionError
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import DType, Graph
from fusec.lowering.packing import to_codes
from fusec.plans.plan_cache import PlanStore
from fusec.reference import evaluate
from fusec.runtime import Executable

pytest.importorskip("cupy")
pytest.importorskip("cudnn")
pytestmark = [pytest.mark.cudnn, needs_compiler]


def _executable(graph: Graph, tmp_path: Path, oracle: Oracle) -> Executable:
    from fusec.gpu.backend import CudnnBackend

    compiled = driver.build(graph, target="h200", oracle=oracle)
    require_runs_on_gpu(compiled)
    return Executable(compiled, CudnnBackend("none", store=PlanStore(tmp_path)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.value)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_narrow_types(name: str, dtype: DType, machine: Machine, tmp_path: Path, asked_once: Oracle) -> None:
    graph, feeds = GRAPHS[name](dtype)
    want = evaluate(graph, feeds)
    exe = _executable(graph, tmp_path, asked_once)
    for _ in range(3):  # step by step, recorded, and replayed
        got = dict(zip(graph.output_names, exe.run(None, feeds), strict=True))
        assert_equal(got, want)
    assert exe.verify().ok


def test_weights_below_eight_bits_are_packed(machine: Machine, tmp_path: Path, asked_once: Oracle) -> None:
    graph, feeds = embedding(DType.U4)
    exe = _executable(graph, tmp_path, asked_once)
    exe.run(None, feeds)
    assert exe._constants.nbytes == -(-9 * 33 // 2)


def test_arrays_on_the_device_are_bytes(machine: Machine, tmp_path: Path, asked_once: Oracle) -> None:
    for dtype in (DType.F8E4M3, DType.I4):
        graph, feeds = moves(dtype)
        want = evaluate(graph, feeds)
        exe = _executable(graph, tmp_path, asked_once)
        codes = to_codes(feeds["q"].reshape(-1), dtype)
        given = {"q": on_device(codes if dtype is DType.I4 else codes.reshape(4, 37)), "x": on_device(feeds["x"])}
        for _ in range(3):
            results = dict(zip(graph.output_names, exe.run(None, given), strict=True))
            assert all(isinstance(array, Array) for array in results.values())
            for output in ("t", "v", "first"):
                raw = results[output].get()
                np.testing.assert_array_equal(raw.reshape(-1), to_codes(want[output].reshape(-1), dtype))
                assert dtype is DType.I4 or raw.shape == want[output].shape
        mixed = {"q": feeds["q"], "x": on_device(feeds["x"])}
        np.testing.assert_array_equal(exe.run(["y"], mixed)[0].get(), want["y"])
        with pytest.raises(ExecutionError, match=r"input %q is .*\[4,37\]: on the GPU its bytes are uint8"):
            exe.run(None, {**given, "q": on_device(np.zeros((4, 36), np.uint8))})


def test_results_are_written_into_the_callers_arrays(machine: Machine, tmp_path: Path, asked_once: Oracle) -> None:
    graph, feeds = moves(DType.U4)
    want = evaluate(graph, feeds)
    exe = _executable(graph, tmp_path, asked_once)
    into = np.zeros((36, 4), DType.U4.numpy)
    exe.run(["t"], feeds, out={"t": into})
    assert_equal({"t": into}, {"t": want["t"]})
