"""Test plans serialized without a GPU: they are those named, and cuDNN reads them back."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from gpu.cudnn.read_back import workspace_bytes
from gpu.cudnn_graphs import conv
from helpers import assert_close

from fusec.errors import TargetError
from fusec.gpu.cudnn.legality.oracle import PROBE
from fusec.gpu.cudnn.plans.plan_serialization import Tries, serialize
from fusec.gpu.device import detect
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.simulator import extent, simulate
from fusec.plans.plan_record import Choice, Entry
from fusec.targets.target import load

pytestmark = pytest.mark.cudnn
H200 = load("h200")


def test_the_first_plans_are_built_and_read_back() -> None:
    graph = conv("bias", "relu")
    said: list[tuple[int, int]] = []
    made = serialize(
        [graph, PROBE, graph], H200, count=2, workers=1, progress=lambda done, total: said.append((done, total))
    )
    assert list(made) == [graph.key, PROBE.key]
    assert said == [(1, 2), (2, 2)]
    for entry in made[graph.key]:
        assert entry.blob is not None
        assert len(entry.blob) > 1000
    assert len({entry.choice.identity for entry in made[graph.key]}) == 2
    first = made[graph.key][0]
    assert first.blob is not None
    assert workspace_bytes(graph, first.blob, H200) == first.choice.workspace_bytes


def test_a_named_plan_is_that_plan_and_skipped_ones_are_left_out() -> None:
    graph = conv("bias", "relu")
    first, second, third = serialize([graph], H200, count=3, workers=1)[graph.key]
    named = Choice(second.choice.engine, second.choice.knobs, 0, 1.5, 1e-4)
    (again,) = serialize([graph], H200, choices={graph.key: [named]}, workers=1)[graph.key]
    assert again.choice == Choice(*second.choice.identity, second.choice.workspace_bytes, 1.5, 1e-4)
    assert again.blob is not None and second.blob is not None
    assert _plan(again.blob) == _plan(second.blob)
    assert _plan(again.blob) != _plan(first.blob or b"")
    rest = serialize([graph], H200, skip={graph.key: [first.choice.identity]}, count=2, workers=1)[graph.key]
    assert [e.choice.identity for e in rest] == [second.choice.identity, third.choice.identity]


def _plan(blob: bytes) -> object:
    """Return engine and knobs by the plan's own JSON."""
    text = blob[blob.index(b'{"cudnnVersion"') :].decode(errors="replace")
    data, _ = json.JSONDecoder().raw_decode(text)
    return data["engine"] if "engine" in data else {k: v for k, v in data.items() if "ngine" in k}


def test_a_plan_that_cannot_be_built_is_one_error() -> None:
    with pytest.raises(TargetError, match="engine 4711"):
        serialize([PROBE], H200, choices={PROBE.key: [Choice(4711, ())]})
    two = tuple(CudnnTensor(uid, (8, 64), (64, 1), DType.F16) for uid in (1, 2))
    with pytest.raises(TargetError, match="h200"):
        serialize([CudnnGraph(two, (CudnnCall("pointwise", (1,), (2,), "gen_index", (("axis", 7),)),))], H200)


def test_a_damaged_plan_is_not_read() -> None:
    (entry,) = serialize([PROBE], H200, count=1)[PROBE.key]
    assert entry.blob is not None
    workspace_bytes(PROBE, entry.blob, H200)
    from fusec.gpu.cudnn.plans.plan_list import DECLINED  # imports cudnn, which needs the driver library loaded

    with pytest.raises(DECLINED):
        workspace_bytes(PROBE, entry.blob[: len(entry.blob) // 2], H200)


def test_this_process_does_not_import_cudnn() -> None:
    program = "import sys, fusec.gpu.cudnn.plans.plan_serialization; print('cudnn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_plan_of_an_engine_that_needs_a_device_has_no_blob() -> None:
    graph, choice = conv("bias", "relu"), Choice(4, (), 0, 9.5, 1e-4)
    assert serialize([graph], H200, choices={graph.key: [choice]})[graph.key] == (Entry(choice),)
    tries = Tries(H200)
    assert [tries(graph, each) for each in (choice, Choice(0, ()), Choice(4711, ()))] == [False, True, False]


@pytest.mark.gpu
def test_a_plan_made_without_the_device_runs_on_it(rng: np.random.Generator) -> None:
    import cudnn
    import cupy

    from fusec.gpu.cudnn.plans.built_plan import revive  # needs cudnn and cupy

    here = detect()
    assert here is not None
    graph = conv("bias", "relu")
    handle = cudnn.create_handle()
    buffers = {t.uid: rng.standard_normal(extent(t)).astype(t.dtype.numpy) for t in (*graph.inputs, *graph.outputs)}
    device = {uid: cupy.asarray(buffer) for uid, buffer in buffers.items()}
    simulate(graph, buffers)
    (output,) = graph.outputs
    for entry in serialize([graph], here)[graph.key]:
        assert entry.blob is not None
        device[output.uid][...] = cupy.nan
        plan = revive(entry.blob, handle)
        workspace = cupy.empty(max(plan.get_workspace_size(), 1), cupy.uint8)
        plan.execute({uid: array.data.ptr for uid, array in device.items()}, workspace.data.ptr, handle)
        cupy.cuda.runtime.deviceSynchronize()
        assert_close(device[output.uid].get(), buffers[output.uid], 2e-3)
