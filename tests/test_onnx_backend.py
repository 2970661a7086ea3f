"""Test `fusec.onnx_backend`, which simulates on device `CPU`, also on a machine with a GPU."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model
from helpers import one_program
from onnx import TensorProto, helper

from fusec import driver
from fusec.errors import ExecutionError, FusecError
from fusec.gpu import device
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.onnx_backend import prepare, run_node, supports_device
from fusec.targets.target import load

X_VALUE = np.arange(6, dtype=np.float32).reshape(2, 3) - 2


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's GPU."""
    monkeypatch.setattr(device, "_first_gpu", lambda: None)


def _relu() -> onnx.ModelProto:
    return model([helper.make_node("Relu", ["x"], ["y"])], [info("x", ["n", 3])], [info("y", None)])


def _reshape() -> onnx.ModelProto:
    inputs = [info("x", [2, 3]), info("shape", [2], TensorProto.INT64)]
    return model([helper.make_node("Reshape", ["x", "shape"], ["y"])], inputs, [info("y", None)])


@pytest.mark.cudnn
def test_it_runs_the_compiled_program() -> None:
    rep = prepare(_relu(), precision="fp16")
    (y,) = rep.run([X_VALUE])
    np.testing.assert_array_equal(y, np.maximum(X_VALUE, 0))
    assert rep.executable is not None
    executable = one_program(rep.executable)
    assert executable.device == "simulated"
    assert executable.compiled.options.precision == "fp16"
    assert executable.compiled.target.name == "h200"
    assert prepare(_relu(), target="cpu").run([X_VALUE])[0].tobytes() == y.tobytes()


def test_only_inputs_that_decide_shapes_are_constants() -> None:
    rep = prepare(_reshape(), target="cpu")
    (y,) = rep.run([X_VALUE, np.array([3, 2])])
    assert y.shape == (3, 2)
    assert rep.executable is not None
    assert [spec.name for spec in rep.executable.inputs] == ["x"]


def test_strings_are_inputs_of_the_executable() -> None:
    inputs = [info("x", ["n"], TensorProto.STRING), info("y", [1], TensorProto.STRING)]
    rep = prepare(
        model([helper.make_node("StringConcat", ["x", "y"], ["z"])], inputs, [info("z", None, TensorProto.STRING)]),
        target="cpu",
    )
    for given in (["a", "b"], ["c", "d"]):
        executable = rep.executable
        (z,) = rep.run([np.array(given), np.array(["!"])])
        assert z.tolist() == [f"{text}!" for text in given]
        assert executable in (None, rep.executable)
    rep.run([np.array(["a"]), np.array(["!"])])
    assert rep.executable is not executable
    assert rep.executable is not None
    assert [spec.name for spec in rep.executable.inputs] == ["x", "y"]


def test_it_compiles_anew_for_other_shapes_and_constants_only() -> None:
    rep, shape = prepare(_reshape(), target="cpu"), np.array([3, 2])
    rep.run([X_VALUE, shape])
    first = rep.executable
    np.testing.assert_array_equal(rep.run([X_VALUE + 1, np.array([3, 2])])[0], (X_VALUE + 1).reshape(3, 2))
    assert rep.executable is first
    shape[:] = [1, 6]  # the array of the first call, filled anew
    assert rep.run([X_VALUE, shape])[0].shape == (1, 6)
    assert rep.executable is not first
    relu = prepare(_relu(), target="cpu")
    assert [relu.run([np.ones((n, 3), np.float32)])[0].shape for n in (1, 2)] == [(1, 3), (2, 3)]


def test_a_model_of_a_sequence_gives_lists() -> None:
    at = helper.make_node("SequenceConstruct", ["x", "x"], ["s"])
    (s,) = prepare(model([at], [info("x", [2, 3])], ["s"], opset=16), target="cpu").run([X_VALUE])
    assert [array.tolist() for array in s] == [X_VALUE.tolist()] * 2


def test_it_runs_a_node() -> None:
    (y,) = run_node(helper.make_node("Relu", ["x"], ["y"]), [X_VALUE], target="cpu")
    np.testing.assert_array_equal(y, np.maximum(X_VALUE, 0))


def test_devices_that_are_not_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supports_device("CPU")
    assert not supports_device("CUDA")
    with pytest.raises(
        ExecutionError, match="device 'CUDA': this machine has no NVIDIA GPU; device 'CPU' runs in simu"
    ):
        prepare(_relu(), "CUDA")
    monkeypatch.setattr(device, "_first_gpu", lambda: ("NVIDIA H200", 90))
    assert supports_device("CUDA:0")
    with pytest.raises(ExecutionError, match=r"device 'CUDA:1' is neither 'CPU', .* nor 'CUDA', the first GPU"):
        prepare(_relu(), "CUDA:1")
    with pytest.raises(ExecutionError, match="target 'l4' is not this machine's GPU; device 'CPU' runs it in simu"):
        prepare(_relu(), "CUDA", target="l4")


@pytest.mark.cudnn
def test_the_cpu_is_the_simulator_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_first_gpu", lambda: ("NVIDIA L4", 89))
    monkeypatch.setattr(device, "woken", None)  # a program in simulation wakes no GPU
    rep = prepare(_relu())
    np.testing.assert_array_equal(rep.run([X_VALUE])[0], np.maximum(X_VALUE, 0))
    assert rep.executable is not None
    executable = one_program(rep.executable)
    assert (executable.device, executable.compiled.target.name) == ("simulated", "l4")


@pytest.mark.cudnn
def test_models_share_an_oracle() -> None:
    with Oracle(load("h200"), workers=1) as oracle:
        add = model([helper.make_node("Add", ["x", "x"], ["y"])], [info("x", [2, 32])], [info("y", None)])
        for proto, array in ((add, np.ones((2, 32), np.float32)), (_relu(), X_VALUE)):
            rep = prepare(proto, oracle=oracle)
            rep.run([array])
            assert rep.executable is not None
            judge = one_program(rep.executable).compiled.judge
            assert getattr(judge, "oracle", None) is oracle
        with pytest.raises(FusecError, match="the oracle asks about h200, not about l4"):
            driver.compile(add, target="l4", oracle=oracle)
