"""Test the interfaces for onnxruntime and torch on a stand-in GPU: arrays stay on the device, shapes share weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontends.onnx.models import info, model
from gpu.stand_in_gpu import Array, Machine, on_device
from helpers import one_program
from lowering.lowers_judge import LowersJudge
from onnx import helper

import fusec
from fusec.errors import FusecError
from fusec.ir import Graph
from fusec.text import parse

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


@pytest.fixture
def machine(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    from fusec.compiler import choose_judge
    from fusec.execution.shape_family import ShapeFamily
    from fusec.gpu import device
    from fusec.gpu.launch import cupy_arrays

    monkeypatch.setattr(cupy_arrays, "cupy", machine.cupy())
    monkeypatch.setattr(choose_judge, "CudnnJudge", lambda *_: LowersJudge())
    monkeypatch.setattr(ShapeFamily, "oracle", lambda *_: None)
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
    from fusec.gpu.cudnn.plans import emit

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
    one, two = (one_program(exe.at({"x": (batch, 32)})) for batch in (1, 2))
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


def test_the_simulator_can_be_chosen_on_a_machine_with_a_gpu(machine: Machine) -> None:
    session = fusec.InferenceSession(net(), providers=["CPUExecutionProvider"])
    assert session.get_providers() == ["CPUExecutionProvider"]
    check(session.run(None, {"x": fresh(2)}), fresh(2))
    assert machine.emitted == []


def test_what_has_no_fixed_order_is_refused_by_name_where_one_is_asked_for(machine: Machine) -> None:
    def scatter(count: int, kind: str) -> Graph:
        return parse(f"""graph "g" (%x: f32[4,2], %i: i64[{count}], %u: f32[{count},2]) {{
          %s = scatter(%x, %i, %u) {{reduction="{kind}"}}
          return %s
        }}""")

    graph = scatter(2000, "add")
    with pytest.raises(FusecError, match=r"%s = scatter.*in no fixed order, which deterministic rules out"):
        fusec.compile(graph, deterministic=True)
    for ordered in (scatter(3, "add"), scatter(2000, "max")):
        assert fusec.compile(ordered, deterministic=True).backend.plan_filter.deterministic  # type: ignore[attr-defined]
    assert fusec.compile(graph).backend.plan_filter.deterministic is False  # type: ignore[attr-defined]  # a GPU's


def test_an_ortvalue_on_the_device_takes_new_values_at_its_address(machine: Machine) -> None:
    session = fusec.InferenceSession(net(), providers=["CUDAExecutionProvider"], tune="none")
    value = fusec.session.OrtValue.ortvalue_from_shape_and_type([2, 32], np.float32, "cuda")
    address = value.data_ptr()
    for seed, given in ((3, fresh(2)), (4, on_device(fresh(2) + 1)), (5, fusec.session.OrtValue(fresh(2) + 2))):
        value.update_inplace(given)
        assert value.data_ptr() == address
        outputs = session.run_with_ort_values(None, {"x": value})
        assert [v.device_name() for v in outputs] == ["cuda", "cuda"]
        check([v.array for v in outputs], fresh(2) + (seed - 3))


def test_work_is_queued_on_the_stream_that_a_provider_names(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    from fusec.gpu.launch import cupy_arrays

    inside: list[int] = []

    @contextmanager
    def stream(address: int) -> Any:
        inside.append(address)
        yield
        inside.append(-address)

    monkeypatch.setattr(cupy_arrays.cupy.cuda, "ExternalStream", stream, raising=False)
    options = {"user_compute_stream": "4096", "device_id": 0}
    session = fusec.InferenceSession(net(), providers=[("CUDAExecutionProvider", options)], tune="none")
    check(session.run(None, {"x": fresh(2)}), fresh(2))
    assert inside == [4096, -4096]


def test_a_profile_of_the_device_names_the_library_of_each_step(machine: Machine, tmp_path: Path) -> None:
    options = fusec.session.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "trace")
    session = fusec.InferenceSession(net(), options, providers=["CUDAExecutionProvider"], tune="none")
    for seed in (2, 2, 2):  # the second run captures, the third replays
        check(session.run(None, {"x": fresh(seed)}), fresh(seed))
    events = json.loads(Path(session.end_profiling()).read_text())
    steps = [event["args"] for event in events if event["cat"] == "Node"]
    assert {step["provider"] for step in steps} == {"CUDAExecutionProvider"}
    assert {step["library"] for step in steps} <= {"cudnn", "cublaslt", "kernel"}


def test_a_file_for_several_shapes_keeps_the_tuned_choices(machine: Machine, tmp_path: Path) -> None:
    exe: Any = fusec.compile(net(), shapes={"N": "1..2..4"}, tune="quick")
    check(exe(fresh(3)), fresh(3))
    exe.save(tmp_path / "net.fusec")
    names = [program.lock().entries for program in (exe.at({"N": n}) for n in (2, 1, 4, 3))]
    loaded: Any = fusec.load(tmp_path / "net.fusec")
    assert loaded.device == exe.device
    built = len(machine.built)
    for batch in (1, 2, 3, 4):
        check(loaded(fresh(batch)), fresh(batch))
    assert len(machine.built) == built  # plans are read, not built
    assert [program.lock().entries for program in (loaded.at({"N": n}) for n in (2, 1, 4, 3))] == names


def test_a_file_can_be_simulated_on_a_machine_with_a_gpu(machine: Machine, tmp_path: Path) -> None:
    exe: Any = fusec.compile(net(), shapes={"N": (1, 2)}, tune="none")
    exe.save(tmp_path / "net.fusec")
    session = fusec.InferenceSession(tmp_path / "net.fusec", providers=["CPUExecutionProvider"])
    assert session.get_providers() == ["CPUExecutionProvider"]
    emitted = len(machine.emitted)
    check(session.run(None, {"x": fresh(2)}), fresh(2))
    assert len(machine.emitted) == emitted
