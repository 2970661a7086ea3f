"""Compare `fusec.InferenceSession` with onnxruntime's: the same calls give the same results."""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from frontends.onnx.models import info, model
from helpers import assert_close, one_program
from onnx import TensorProto, helper

import fusec
from fusec.errors import ExecutionError, FusecError, ModelError
from fusec.session import CPU, GPU, OrtValue

pytestmark = [pytest.mark.cudnn, pytest.mark.usefixtures("no_gpu")]


def net(batch: int | str | None = "N") -> onnx.ModelProto:
    """Two outputs from two inputs, one of them of integers."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Relu", ["m"], ["y"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["y", "f"], ["z"]),
    ]
    held = {"w": np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)}
    inputs = [info("x", [batch, 4]), info("i", [batch, 6], TensorProto.INT64)]
    proto = model(nodes, inputs, [info("y", [batch, 6]), info("z", [batch, 6])], held, producer_name="tests")
    proto.domain, proto.model_version, proto.doc_string = "ai.tests", 3, "a net"
    helper.set_model_props(proto, {"task": "none"})
    return proto


def feeds(batch: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch)
    return {"x": rng.standard_normal((batch, 4)).astype(np.float32), "i": rng.integers(-5, 5, (batch, 6))}


def test_every_call_can_give_the_same_bits() -> None:
    for asked in (False, True):
        session = fusec.InferenceSession(net(2).SerializeToString(), deterministic=asked)
        shapes = session.executable.shapes[0]
        assert one_program(session.executable.at(shapes)).compiled.options.deterministic is asked


def test_lists_become_arrays_of_the_inputs_types() -> None:
    lists = {name: array.tolist() for name, array in feeds().items()}
    got = fusec.InferenceSession(net().SerializeToString()).run(None, lists)
    for ours, theirs in zip(got, peer(net()).run(None, lists), strict=True):
        assert_close(ours, theirs, 1e-6)


def test_a_list_of_floats_is_no_input_of_integers() -> None:
    lists = {**feeds(), "i": [[0.5] * 6] * 2}
    with pytest.raises(ExecutionError, match="input %i takes int64, not float64"):
        fusec.InferenceSession(net().SerializeToString()).run(None, lists)


def peer(proto: onnx.ModelProto) -> Any:
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("batch", ["N", None, 2])
def test_interface_and_results_match_onnxruntime(batch: int | str | None) -> None:
    ours, theirs = fusec.InferenceSession(net(batch).SerializeToString()), peer(net(batch))
    for get in ("get_inputs", "get_outputs"):
        want = [(a.name, a.shape, a.type) for a in getattr(theirs, get)()]
        assert [(a.name, a.shape, a.type) for a in getattr(ours, get)()] == want
    for names in (None, [], ["z"], ["z", "y"]):
        want = theirs.run(names, feeds())
        got = ours.run(names, feeds())
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, 1e-6)
    meta, known = ours.get_modelmeta(), theirs.get_modelmeta()
    for name in ("producer_name", "graph_name", "domain", "description", "version", "custom_metadata_map"):
        assert getattr(meta, name) == getattr(known, name), name


def test_strings_match_onnxruntime() -> None:
    inputs = [info("x", ["N"], TensorProto.STRING), info("y", [1], TensorProto.STRING)]
    nodes = [helper.make_node("StringConcat", ["x", "y"], ["z"])]
    proto = model(nodes, inputs, [info("z", ["N"], TensorProto.STRING)])
    ours, theirs = fusec.InferenceSession(proto), peer(proto)
    for get in ("get_inputs", "get_outputs"):
        want = [(a.name, a.shape, a.type) for a in getattr(theirs, get)()]
        assert [(a.name, a.shape, a.type) for a in getattr(ours, get)()] == want
    for x in (["a", "b"], ["é", "d", ""]):
        given = {"x": np.array(x, object), "y": np.array(["!"], object)}
        assert ours.run(None, given)[0].tolist() == theirs.run(None, given)[0].tolist() == [f"{text}!" for text in x]
        assert ours.run(None, {"x": x, "y": ["!"]})[0].tolist() == [f"{text}!" for text in x]


@pytest.mark.parametrize("name", ["FLOAT16", "DOUBLE", "INT8", "UINT64", "BOOL", "BFLOAT16", "FLOAT8E4M3FN"])
def test_type_names_match_onnxruntime(name: str) -> None:
    number = getattr(TensorProto, name)
    proto = model([helper.make_node("Identity", ["x"], ["y"])], [info("x", [2], number)], [info("y", [2], number)])
    assert fusec.InferenceSession(proto).get_inputs()[0].type == peer(proto).get_inputs()[0].type


def test_a_path_and_options_of_onnxruntime_are_accepted(tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "net.onnx")
    options = onnxruntime.SessionOptions()
    session = fusec.InferenceSession(str(tmp_path / "net.onnx"), options, providers=[CPU], provider_options=[{}])
    assert session.get_providers() == [CPU]
    assert_close(session.run(["y"], feeds(), None)[0], peer(net()).run(["y"], feeds())[0], 1e-6)


def test_a_compiled_model_is_accepted(tmp_path: Path) -> None:
    fusec.compile(net(2), target="l4").save(tmp_path / "net.fusec")
    session = fusec.InferenceSession(tmp_path / "net.fusec")
    assert [a.shape for a in session.get_inputs()] == [[2, 4], [2, 6]]
    assert_close(session.run(["z"], feeds())[0], peer(net()).run(["z"], feeds())[0], 1e-6)
    assert one_program(session.executable.at({"x": (2, 4), "i": (2, 6)})).compiled.target.name == "l4"


def test_feeds_decide_shapes_and_buckets_apply() -> None:
    session = fusec.InferenceSession(net(), buckets={"N": [4]}, max_shapes=2)
    for batch in (1, 3, 4, 5):
        assert_close(session.run(["z"], feeds(batch))[0], peer(net()).run(["z"], feeds(batch))[0], 1e-6)
    assert [s["x"][0] for s in session.executable.shapes] == [4, 5]
    with pytest.raises(ExecutionError, match="dim 'N' is 2 in input %x, 3 in input %i"):
        session.run(None, {"x": feeds(2)["x"], "i": feeds(3)["i"]})
    with pytest.raises(ExecutionError, match="input %x takes float32, not float64"):
        session.run(None, {**feeds(), "x": feeds()["x"].astype(np.float64)})


def test_a_model_of_fixed_shapes_is_compiled_immediately() -> None:
    assert fusec.InferenceSession(net(2)).executable.shapes == [{"x": (2, 4), "i": (2, 6)}]
    bad = model([helper.make_node("Nonsense", ["x"], ["y"])], [info("x", [2])], ["y"])
    with pytest.raises(ModelError, match="op Nonsense"):
        fusec.InferenceSession(bad)


def test_outputs_that_declare_nothing_are_known_once_compiled() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    (output,) = fusec.InferenceSession(model(nodes, [info("x", [2, 3])], ["y"])).get_outputs()
    assert (output.name, output.shape, output.type) == ("y", [2, 3], "tensor(float)")
    (output,) = fusec.InferenceSession(model(nodes, [info("x", ["N", 3])], ["y"])).get_outputs()
    assert (output.name, output.type) == ("y", "tensor(undefined)")


def test_providers() -> None:
    with pytest.raises(FusecError, match="fusec has no provider 'DmlExecutionProvider'"):
        fusec.InferenceSession(net(), providers=["DmlExecutionProvider"])
    with pytest.warns(UserWarning, match="CUDAExecutionProvider: this machine has no such GPU"):
        session = fusec.InferenceSession(net(), providers=[(GPU, {"device_id": 0}), CPU])
    assert session.get_providers() == [CPU]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusec.InferenceSession(net())


def test_a_binding_reads_and_writes_the_bound_memory() -> None:
    session, given = fusec.InferenceSession(net()), feeds()
    y, z = np.zeros((2, 6), np.float32), np.zeros((2, 6), np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", given["x"])
    i = given["i"]
    binding.bind_input("i", "cpu", 0, np.int64, i.shape, i.ctypes.data)
    binding.bind_output("z", "cpu", 0, np.float32, z.shape, z.ctypes.data)
    binding.bind_ortvalue_output("y", OrtValue.from_dlpack(y))
    with pytest.raises(ExecutionError, match="has no results yet"):
        binding.copy_outputs_to_cpu()
    for seed in (5, 6):
        given["x"][...] = np.random.default_rng(seed).standard_normal((2, 4))
        i[...] = seed
        binding.synchronize_inputs()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        want = peer(net()).run(["y", "z"], given)
        assert_close(y, want[0], 1e-6)
        assert_close(z, want[1], 1e-6)
        copied = binding.copy_outputs_to_cpu()
        assert_close(copied[0], want[1], 1e-6)  # in the order they were bound
        assert binding.get_outputs()[1].data_ptr() == y.ctypes.data
    binding.clear_binding_outputs()
    with pytest.raises(ExecutionError, match="no output is bound"):
        session.run_with_iobinding(binding)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    assert binding.get_outputs()[0].device_name() == "cpu"
    assert_close(binding.get_outputs()[0].numpy(), y, 0)
    binding.clear_binding_inputs()
    with pytest.raises(ExecutionError, match="input %x is missing"):
        session.run_with_iobinding(binding)


def test_ortvalues() -> None:
    session, given = fusec.InferenceSession(net()), feeds()
    values = {name: OrtValue.ortvalue_from_numpy(array) for name, array in given.items()}
    theirs = onnxruntime.OrtValue.ortvalue_from_numpy(given["x"])
    assert values["x"].data_type() == theirs.data_type()
    assert values["x"].shape() == list(theirs.shape())
    assert values["x"].device_name() == theirs.device_name()
    (got,) = session.run_with_ort_values(["z"], values)
    want = peer(net()).run(["z"], given)[0]
    assert_close(got.numpy(), want, 1e-6)
    binding = session.io_binding()
    binding.bind_ortvalue("x", values["x"])
    binding.bind_ortvalue("i", values["i"])
    place = OrtValue.ortvalue_from_shape_and_type([2, 6], np.float32)
    binding.bind_ortvalue("z", place)
    session.run_with_iobinding(binding)
    assert_close(np.from_dlpack(place), want, 1e-6)


def test_what_cannot_be_bound_is_refused() -> None:
    binding = fusec.InferenceSession(net()).io_binding()
    with pytest.raises(ExecutionError, match="no input %q; inputs are %x, %i"):
        binding.bind_cpu_input("q", np.zeros(1))
    with pytest.raises(ExecutionError, match="no output %x; outputs are %y, %z"):
        binding.bind_output("x")
    with pytest.raises(FusecError, match="a device is cpu or cuda, not 'dml'"):
        binding.bind_output("y", "dml")
    with pytest.raises(FusecError, match="device 0, not on device 1"):
        binding.bind_output("y", "cuda", 1)
    with pytest.raises(FusecError, match="an address needs element_type and shape"):
        binding.bind_output("y", buffer_ptr=4096)
    with pytest.raises(FusecError, match="needs a GPU, and this machine has none"):
        OrtValue.ortvalue_from_shape_and_type([2], np.float32, "cuda")
    with pytest.raises(FusecError, match="int4 cannot be bound, because it holds two elements in a byte"):
        binding.bind_input("x", "cpu", 0, ml_dtypes.int4, [2, 4], 4096)


def test_memory_with_a_cuda_interface_is_on_the_device() -> None:
    value = OrtValue.from_dlpack(types.SimpleNamespace(__cuda_array_interface__={"data": (4096, False)}))
    assert value.device_name() == "cuda"
    assert value.data_ptr() == 4096


@pytest.mark.gpu
def test_arrays_stay_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from fusec.gpu import device

    monkeypatch.delenv("FUSEC_DEVICE")
    device._first_gpu.cache_clear()
    session, given = fusec.InferenceSession(net(), providers=[GPU, CPU]), feeds()
    assert session.get_providers() == [GPU, CPU]
    want = peer(net()).run(["y", "z"], given)
    held = {name: cupy.asarray(array) for name, array in given.items()}
    for got, array in zip(session.run(["y", "z"], held), want, strict=True):
        assert isinstance(got, cupy.ndarray)
        assert_close(got.get(), array, 1e-5)
    binding = session.io_binding()
    x, z = held["x"], cupy.zeros((2, 6), cupy.float32)
    binding.bind_input("x", "cuda", 0, np.float32, x.shape, x.data.ptr)
    binding.bind_cpu_input("i", given["i"])
    binding.bind_output("z", "cuda", 0, np.float32, z.shape, z.data.ptr)
    binding.bind_output("y", "cuda")
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    assert_close(z.get(), want[1], 1e-5)
    assert binding.get_outputs()[1].device_name() == "cuda"
    assert_close(binding.copy_outputs_to_cpu()[1], want[0], 1e-5)
    simulated = fusec.InferenceSession(net(), providers=[CPU])
    assert simulated.get_providers() == [CPU]
    assert_close(simulated.run(["z"], given)[0], want[1], 1e-5)
