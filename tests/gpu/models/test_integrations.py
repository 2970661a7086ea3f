"""The doors on a stand-in GPU: arrays stay on the device, programs of several shapes have their weights in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontends.onnx.models import info, model
from gpu.stand_in_gpu import Array, Machine, on_device
from lowering.lowers_judge import LowersJudge
from onnx import helper

import fusec
from fusec.errors import FusecError
from fusec.text import parse

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


@pytest.fixture
def machine(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    from fusec import driver
    from fusec.compiler import choose_judge
    from fusec.gpu import device
    from fusec.gpu.launch import cupy_arrays

    monkeypatch.setattr(cupy_arrays, "cupy", machine.cupy())
    monkeypatch.setattr(choose_judge, "CudnnJudge", lambda *_: LowersJudge())
    monkeypatch.setattr(driver.ShapeFamily, "oracle", lambda *_: None)
    monkeypatch.setattr(device, "_first_gpu", lambda: ("NVIDIA H200", 90))
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    return machine


WEIGHT = np.random.default_rng(9).standard_normal((32, 32)).astype(np.float32)


def net() -> Any:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["y"]),
        helper.make_node("Mul", ["y", "y"], ["z"]),
    ]
    outputs = [info(name, ["N", 32]) for name in "yz"]
    return model(nodes, [info("x", ["N", 32])], outputs, {"w": WEIGHT})


def fresh(batch: int) -> np.ndarray:
    return np.random.default_rng(batch).standard_normal((batch, 32)).astype(np.float32)


def check(got: Any, x: np.ndarray) -> None:
    y = np.maximum(x @ WEIGHT, 0)
    for array, want in zip(got, (y, y * y), strict=True):
        np.testing.assert_allclose(array.get() if isinstance(array, Array) else array, want, rtol=1e-4, atol=1e-5)


def test_sizes_have_weights_and_kernels_in_common(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.gpu.cudnn import emit

    made: list[str] = []
    monkeypatch.setattr(emit, "kernel_cache", lambda: made.append("cache") or "cache")
    machine.runtime_compiled = True
    exe = fusec.compile_dynamic(net(), tune="none", share_kernels=True)
    assert exe.device == "NVIDIA H200"
    for batch in (1, 2, 1, 2, 2):
        x = fresh(batch)
        results = exe.run(None, {"x": on_device(x)})
        assert all(isinstance(array, Array) for array in results)
        check(results, x)
    one, two = (exe.at({"x": (batch, 32)}) for batch in (1, 2))
    assert one._constants.arrays
    assert {id(a) for a in one._constants.arrays.values()} == {id(a) for a in two._constants.arrays.values()}
    assert one.compiled.judge is two.compiled.judge
    assert made == ["cache"]
    assert {kernels for _, kernels in machine.emitted} == {None, "cache"}
    machine.emitted.clear()
    fusec.compile_dynamic(net(), tune="none").at({"x": (1, 32)})
    assert {kernels for _, kernels in machine.emitted} == {None}


def test_padding_and_cutting_stay_on_the_device(machine: Machine) -> None:
    exe = fusec.compile_dynamic(net(), tune="none", buckets={"N": [4]})
    for batch in (3, 1, 4, 2):
        x = fresh(batch)
        results = exe.run(None, {"x": on_device(x)})
        assert all(isinstance(array, Array) for array in results)
        check(results, x)
        check(exe.run(None, {"x": x}), x)
    assert exe.shapes == [{"x": (4, 32)}]
    x = fresh(3)
    host, device = np.zeros_like(x), on_device(np.zeros_like(x))
    for given in (x, on_device(x)):
        host[...], device[...] = 0, 0
        got = exe.run(["y", "z"], {"x": given}, out={"y": host, "z": device})
        assert got[0] is host
        assert got[1] is device
        check(got, x)


def test_a_binding_reads_and_writes_device_memory(machine: Machine) -> None:
    session = fusec.InferenceSession(net(), providers=["CUDAExecutionProvider"], tune="none")
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    binding = session.io_binding()
    x, y = on_device(fresh(2)), on_device(np.zeros((2, 32), np.float32))
    binding.bind_input("x", "cuda", 0, np.float32, x.shape, x.data.ptr)
    binding.bind_output("y", "cuda", 0, np.float32, y.shape, y.data.ptr)
    binding.bind_output("z", "cuda")
    for seed in (3, 4):
        x[...] = np.random.default_rng(seed).standard_normal(x.shape)
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        check([y, binding.get_outputs()[1].array], x.get())
        assert [v.device_name() for v in binding.get_outputs()] == ["cuda", "cuda"]
        check(binding.copy_outputs_to_cpu(), x.get())
    binding.bind_output("z", "cpu")
    session.run_with_iobinding(binding)
    assert binding.get_outputs()[1].device_name() == "cpu"
    value = fusec.session.OrtValue.ortvalue_from_numpy(fresh(1), "cuda")
    assert value.device_name() == "cuda"
    check(session.run(None, {"x": value}), fresh(1))


def test_the_simulator_can_be_asked_for_beside_a_gpu(machine: Machine) -> None:
    session = fusec.InferenceSession(net(), providers=["CPUExecutionProvider"])
    assert session.get_providers() == ["CPUExecutionProvider"]
    check(session.run(None, {"x": fresh(2)}), fresh(2))
    assert machine.emitted == []


def test_what_has_no_fixed_order_is_refused_by_name_where_one_is_asked_for(machine: Machine) -> None:
    graph = parse("""graph "g" (%x: f32[4,2], %i: i64[3], %u: f32[3,2]) {
      %s = scatter(%x, %i, %u) {reduction="add"}
      return %s
    }""")
    with pytest.raises(FusecError, match=r"%s = scatter.*in no fixed order, which deterministic rules out"):
        fusec.compile(graph, deterministic=True)
    assert fusec.compile(graph).backend.deterministic is False  # type: ignore[attr-defined]  # a GPU's
