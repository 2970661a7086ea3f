"""Test inputs and outputs that use NHWC memory: no copies, and the same results in every layout."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close, one_program
from lowering.lowers_judge import LowersJudge

import fusec
from fusec import lockfile
from fusec.artifacts import container, fusec_file
from fusec.errors import ExecutionError, FusecError, ModelError
from fusec.execution.compilation import Compiled
from fusec.ir import Graph, channels_last
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.layout.io_layout import chosen, insert_interface_copies
from fusec.passes.partition import partition
from fusec.reference import evaluate
from fusec.runtime import Executable, SimulatorBackend
from fusec.targets.target import load
from fusec.text import parse

NHWC = (0, 2, 3, 1)
BLOCK = """
graph "block" (%x: f32[2,8,6,5], %t: f32[2,8]) {
  %w = constant weight("w") : f32[8,8,3,3]
  %s = reshape(%t) {shape=[2,8,1,1]}
  %c = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}
  %d = add(%c, %s)
  %e = relu(%d)
  %y = add(%e, %x)
  %m = reduce(%y) {kind="mean", axes=[2,3], keepdims=false}
  return %y, %m
}"""


def source(text: str = BLOCK) -> Graph:
    return parse(text, {"w": np.random.default_rng(1).standard_normal((8, 8, 3, 3)).astype(np.float32) / 8})


def compiled(which: Any = True, text: str = BLOCK, disable: tuple[str, ...] = ()) -> Compiled:
    """As `fusec.compile` does it, without cuDNN."""
    graph, judge, target = source(text), LowersJudge(), load("h200")
    options = Options(disable=frozenset(disable), orders=chosen(graph, which, {}))
    laid = run(PIPELINE, graph.clone(), options)
    insert_interface_copies(laid, options)
    return Compiled(graph, partition(laid, judge, target), target, options, judge)


def executable(which: Any = True, text: str = BLOCK, disable: tuple[str, ...] = ()) -> Executable:
    return Executable(compiled(which, text, disable), SimulatorBackend())


def last(array: np.ndarray) -> np.ndarray:
    """The same array, channels last in memory."""
    order = channels_last(array.ndim)
    return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))


def lies_last(array: Any) -> bool:
    return array.transpose(channels_last(array.ndim)).flags.c_contiguous


def feeds(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = shapes or {"x": (2, 8, 6, 5), "t": (2, 8)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def copies(net: Executable) -> int:
    return sum(node.op.name == "relayout" for node in net.compiled.graph.nodes)


def test_nothing_is_copied_at_the_edges() -> None:
    net, plain = executable(), executable(False)
    assert (copies(net), copies(plain)) == (0, 2)
    text = str(net.compiled.graph)
    assert "(%x: f32[2,8,6,5]{0,2,3,1}, %t: f32[2,8])" in text
    assert str(parse(text, {"w": np.zeros((8, 8, 3, 3), np.float32)})) == text
    assert [spec.order for spec in net.inputs] == [NHWC, ()]
    assert [spec.order for spec in net.outputs] == [NHWC, ()]
    assert [spec.order for spec in plain.outputs] == [(), ()]
    assert [spec.shape for spec in net.inputs] == [spec.shape for spec in plain.inputs]


@pytest.mark.parametrize("which", [True, ["x"], ["y"], "x", ["x", "y"]], ids=str)
@pytest.mark.parametrize("disable", [(), ("assign_layout",)], ids=["laid out", "as it was"])
def test_results_are_the_same_in_the_promised_layout(which: Any, disable: tuple[str, ...]) -> None:
    net = executable(which, disable=disable)
    names = {"x", "y"} if which is True else {which} if isinstance(which, str) else set(which)
    assert {spec.name for spec in (*net.inputs, *net.outputs) if spec.order == NHWC} == names
    for seed in range(2):
        given = feeds(seed)
        want = evaluate(net.compiled.source, given)
        turned = {"x": last(given["x"]), "t": given["t"]}
        strided = {"x": np.repeat(given["x"], 2, axis=3)[..., ::2], "t": given["t"]}
        for each in (given, turned, strided):
            y, m = net.run(None, each)
            assert_close(y, want["y"], 1e-5)
            assert_close(m, want["m"], 1e-5)
            assert (lies_last(y), y.flags.c_contiguous) == (("y" in names), "y" not in names)


def test_results_are_written_into_arrays_of_any_order() -> None:
    net, given = executable(), feeds()
    want = net(**given)[0]
    for out in (np.empty((2, 8, 6, 5), np.float32), last(np.empty((2, 8, 6, 5), np.float32))):
        assert net.run(["y"], given, out={"y": out})[0] is out
        np.testing.assert_array_equal(out, want)


def test_input_buffers_have_the_layout_of_inputs() -> None:
    net, given = executable(), feeds()
    want = net(**given)[0].copy()
    buffer = net.input_buffers["x"]
    assert lies_last(buffer) and buffer.shape == (2, 8, 6, 5)
    buffer[...] = given["x"]
    np.testing.assert_array_equal(net.run(["y"], {**given, "x": buffer})[0], want)


def test_checks_pass() -> None:
    for disable in ((), ("assign_layout",)):
        assert executable(disable=disable).verify().ok


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("f32[1,8,6,5]", (1, 8, 6, 5)),
        ("f32[4,8,1,1]", (4, 8, 1, 1)),
        ("f32[4,1,6,5]", (4, 1, 6, 5)),
        ("f32[2,3,4,5,6]", (2, 3, 4, 5, 6)),
        ("f32[0,3,4,5]", (0, 3, 4, 5)),
    ],
)
def test_what_only_passes_through(text: str, shape: tuple[int, ...]) -> None:
    model = f'graph "g" (%x: {text}) {{\n  %y = relu(%x)\n  return %y, %x as "again"\n}}'
    net, x = executable(True, model), feeds(x=shape)["x"]
    for array in (x, last(x)):
        y, again = net(array)
        assert lies_last(y) and lies_last(again)
        np.testing.assert_array_equal(y, np.maximum(x, 0))
        np.testing.assert_array_equal(again, x)
    assert copies(net) == 0 or not x.size


def test_an_output_is_transposed_by_the_kernel_that_computes_it() -> None:
    """A constant is stored so; one value under two names lies in one order each."""
    model = """graph "g" (%x: f32[2,8,6,5]) {
  %w = constant weight("w") : f32[8,8,3,3]
  %y = relu(%x)
  return %w, %y, %y as "z"
}"""
    net, x = executable(["w", "z"], model), feeds(x=(2, 8, 6, 5))["x"]
    w, y, z = net(x)
    assert lies_last(w) and y.flags.c_contiguous and lies_last(z)
    np.testing.assert_array_equal(w, source(model).value("w").literal.array)  # type: ignore[union-attr]  # a constant
    np.testing.assert_array_equal(y, z)


def test_three_dims_are_meant_only_by_name() -> None:
    model = 'graph "g" (%x: f32[2,8,6]) {\n  %y = relu(%x)\n  return %y\n}'
    assert executable(True, model).inputs[0].order == ()
    net, x = one_program(executable(["x", "y"], model)), feeds(x=(2, 8, 6))["x"]
    assert net.inputs[0].order == net.outputs[0].order == (0, 2, 1)
    np.testing.assert_array_equal(net(x), np.maximum(x, 0))


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (["q"], "%q is no input or output of the model; those are %x, %t, %y, %m"),
        ("t", r"%t is f32\[2,8\]; channels are the second of 3 to 5 dims"),
        (["y", "m"], r"%m is f32\[2,8\]"),
    ],
)
def test_values_that_cannot_be_channels_last_are_named(which: Any, message: str) -> None:
    with pytest.raises(FusecError, match=f"channels_last: {message}"):
        fusec.compile(source(), target="cpu", channels_last=which)


def test_state_keeps_its_own_order() -> None:
    b = fusec.Builder("f32")
    x = b.input("x", (2, 8, 6, 5))
    w = b.parameter("w", np.random.default_rng(0).standard_normal((8, 8, 3, 3)).astype(np.float32) / 8)
    y = b.pointwise("relu", b.conv(x, w, 1, 1))
    b.update(w, w * 0.5)
    b.output(y=y)
    given = feeds(x=(2, 8, 6, 5))["x"]
    nets = [one_program(fusec.compile(b, target="cpu", channels_last=which)) for which in (False, True)]
    assert [spec.order for spec in nets[1].inputs] == [NHWC, ()]
    for _ in range(2):
        plain, turned = (net.step(x=given) for net in nets)
        assert lies_last(turned)
        assert_close(turned, plain, 1e-6)
    assert_close(nets[1].value("w"), nets[0].value("w"), 1e-6)
    with pytest.raises(FusecError, match="%w is state"):
        fusec.compile(b, target="cpu", channels_last=["w"])


def test_the_cpu_target_keeps_the_promise() -> None:
    net, given = one_program(fusec.compile(source(), target="cpu", channels_last=True)), feeds()
    assert [spec.order for spec in (*net.inputs, *net.outputs)] == [NHWC, (), NHWC, ()]
    want = evaluate(source(), given)["y"]
    for x in (given["x"], last(given["x"])):
        y, _ = net(x, given["t"])
        assert lies_last(y)
        assert_close(y, want, 1e-5)


def test_a_file_keeps_it(tmp_path: Path) -> None:
    path, made = tmp_path / "net.fusec", compiled()
    fusec_file.save(path, [made])
    read = fusec_file.load(path, "h200").compiled
    assert read.options == made.options
    net, given = one_program(Executable(read, SimulatorBackend())), feeds()
    assert net.inputs[0].order == NHWC and lies_last(net(**given)[0])
    with pytest.raises(FusecError, match="with other options"):
        fusec_file.save(path, [made, dataclasses.replace(compiled(False), target=load("a100"))])


@pytest.mark.parametrize(
    "orders", [5, ["x"], [["x", 1]], [["x", [0, 2, 2, 1]]], [["x", [0, True]]], [[1, [0]]]], ids=str
)
def test_a_file_that_says_it_badly_is_refused(tmp_path: Path, orders: Any) -> None:
    path = tmp_path / "net.fusec"
    fusec_file.save(path, [compiled()])
    with zipfile.ZipFile(path) as file:
        members = {info: file.read(info) for info in file.infolist()}
    with zipfile.ZipFile(path, "w") as file:
        for info, data in members.items():
            if info.filename == container.MANIFEST:
                manifest = json.loads(data)
                manifest["options"]["orders"] = orders
                data = json.dumps(manifest).encode()
            file.writestr(info, data)
    with pytest.raises(ModelError):
        fusec_file.load(path, "h200")


def test_locks_tell_them_apart() -> None:
    plain, turned = (lockfile.text_of(lockfile.make([compiled(which)])) for which in (False, True))
    assert "{0,2,3,1}" in turned and plain != turned


@pytest.mark.cudnn
def test_a_whole_compilation_and_its_plans() -> None:
    """Compiles with the public API; cuDNN has plans for a sequence without copies."""
    found = (fusec.compile(source(), precision="fp16", target="h200", channels_last=on) for on in (False, True))
    nets = [one_program(each) for each in found]
    launches = [net.compiled.program.launches for net in nets]
    assert launches[1] == launches[0] - 2
    given = feeds()
    y, m = nets[1](last(given["x"]), given["t"])
    assert lies_last(y) and y.dtype == np.float32
    plain = nets[0](**given)
    assert_close(y, plain[0], 2e-3)
    assert_close(m, plain[1], 2e-3)


@pytest.mark.cudnn
def test_sizes_that_fit_and_sizes_that_are_padded() -> None:
    from dynamic_shapes.test_executable import image_net

    graph = image_net()
    graph.graph.output.append(type(graph.graph.output[0])(name="r"))
    want = fusec.compile_dynamic(graph, simulate=True)
    net = fusec.compile_dynamic(graph, simulate=True, channels_last=["x", "r"], buckets={"N": [4]})
    for batch in (1, 3, 4, 5):
        x = feeds(batch, x=(batch, 3, 8, 8))["x"]
        for array in (x, last(x)):
            y, r = net(array)
            assert lies_last(r)
            for got, right in zip((y, r), want(x), strict=True):
                assert_close(got, right, 1e-5)
    assert [shapes["x"][0] for shapes in net.shapes] == [4, 5]
    session = fusec.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"], channels_last=True)
    (r,) = session.run(["r"], {"x": x})
    assert lies_last(r)
    binding = session.io_binding()
    out = last(np.empty_like(r))
    binding.bind_cpu_input("x", last(x))
    binding.bind_ortvalue_output("r", fusec.session.OrtValue.from_dlpack(out))
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(out, r)
    with pytest.raises(FusecError, match="%q is no input or output"):
        fusec.compile_dynamic(graph, simulate=True, channels_last=["q"])


def test_an_array_of_another_shape_is_no_matter_of_order() -> None:
    with pytest.raises(ExecutionError, match=r"has shape \[2, 8, 6, 5\], the array \[2, 6, 5, 8\]"):
        executable()(np.zeros((2, 6, 5, 8), np.float32), np.zeros((2, 8), np.float32))
