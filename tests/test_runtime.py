"""Test executables on the simulator: arguments, results, threads and views."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from lowering.lowers_judge import LowersJudge

from fusec import driver
from fusec.errors import ExecutionError
from fusec.execution.compilation import Compiled
from fusec.ir import TensorType, Value
from fusec.lowering.packing import unpack
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.reference import evaluate
from fusec.runtime import Executable, SimulatorBackend
from fusec.schedule.program import Partition
from fusec.targets.target import load
from fusec.text import parse

MODEL = """
graph "net" (%x: f32[2,3,8,8], %k: f32[1,4,1,1]) {
  %w = constant weight("w") : f32[4,3,3,3]
  %b = constant [0.5, -0.5, 0.25, 1.0] : f32[4,1,1]
  %c = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}
  %d = add(%c, %b)
  %e = relu(%d)
  %f = mul(%e, %k)
  %p = max_pool(%f) {window=[2,2], strides=[2,2], pads=[0,0,0,0], dilations=[1,1]}
  %s, %t = split(%p) {axis=0, sizes=[1,1]}
  %u = sub(%s, %t)
  %r = reshape(%u) {shape=[1,64]}
  return %r as "flat", %e as "map"
}"""


def executable(
    text: str = MODEL, weights: Mapping[str, np.ndarray] | None = None, backend: SimulatorBackend | None = None
) -> Executable:
    source = parse(text, weights or {"w": np.random.default_rng(3).standard_normal((4, 3, 3, 3)).astype(np.float32)})
    graph = run(PIPELINE, source.clone(), Options())
    target, judge = load("h200"), LowersJudge()
    compiled = Compiled(source, partition(graph, judge, target), target, Options(), judge)
    return Executable(compiled, backend or SimulatorBackend())


@pytest.fixture(scope="module")
def net() -> Executable:
    return executable()


@pytest.fixture
def feeds(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32),
        "k": rng.standard_normal((1, 4, 1, 1)).astype(np.float32),
    }


def test_specs_describe_the_interface(net: Executable) -> None:
    assert [(s.name, s.shape, s.dtype) for s in net.inputs] == [
        ("x", (2, 3, 8, 8), np.float32),
        ("k", (1, 4, 1, 1), np.float32),
    ]
    assert [(s.name, s.shape) for s in net.outputs] == [("flat", (1, 64)), ("map", (2, 4, 8, 8))]
    assert net.device == "simulated"


def test_every_kind_of_call_gives_the_reference_result(net: Executable, feeds: dict[str, np.ndarray]) -> None:
    want = evaluate(net.compiled.source, feeds)
    ways: list[Any] = [
        net(feeds["x"], feeds["k"]),
        net(feeds["x"], k=feeds["k"]),
        net(**feeds),
        tuple(net.run(None, feeds)),
    ]
    for flat, mapped in ways:
        assert_close(flat, want["flat"], 1e-5)
        assert_close(mapped, want["map"], 1e-5)
    (only,) = net.run(["map"], feeds)
    assert_close(only, want["map"], 1e-5)


def test_one_output_comes_bare(rng: np.random.Generator) -> None:
    net = executable('graph "g" (%x: f32[3,4]) {\n  %y = exp(%x)\n  return %y\n}')
    x = rng.standard_normal((3, 4)).astype(np.float32)
    assert_close(net(x), np.exp(x), 1e-6)


class OnlyDlpack:
    """An array of a library NumPy does not know, such as torch."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_any_array_with_dlpack_is_accepted(net: Executable, feeds: dict[str, np.ndarray]) -> None:
    want = net(**feeds)
    got = net(**{name: OnlyDlpack(array) for name, array in feeds.items()})
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 0.0)


def test_strided_arguments_are_read_as_they_are(net: Executable, feeds: dict[str, np.ndarray]) -> None:
    strided = np.ascontiguousarray(feeds["x"].transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert not strided.flags.c_contiguous
    assert_close(net(strided, feeds["k"])[0], net(**feeds)[0], 0.0)


def test_results_stay_when_the_executable_runs_again(net: Executable, feeds: dict[str, np.ndarray]) -> None:
    first, _ = net(**feeds)
    kept = first.copy()
    net(-feeds["x"], feeds["k"])
    assert_close(first, kept, 0.0)


def test_arguments_are_not_changed(net: Executable, feeds: dict[str, np.ndarray]) -> None:
    before = {name: array.copy() for name, array in feeds.items()}
    net(**feeds)
    for name, array in feeds.items():
        assert_close(array, before[name], 0.0)


def test_threads_do_not_disturb_each_other(net: Executable, rng: np.random.Generator) -> None:
    inputs = [rng.standard_normal((2, 3, 8, 8)).astype(np.float32) for _ in range(6)]
    k = np.ones((1, 4, 1, 1), np.float32)
    want = [net(x, k)[0] for x in inputs]
    got: dict[int, np.ndarray] = {}
    threads = [threading.Thread(target=lambda i=i, x=x: got.__setitem__(i, net(x, k)[0])) for i, x in enumerate(inputs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, array in enumerate(want):
        assert_close(got[index], array, 0.0)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"k": np.ones((1, 4, 1, 1), np.float32)}, "input %x is missing"),
    "unknown": (
        {"x": np.ones((2, 3, 8, 8), np.float32), "k": np.ones((1, 4, 1, 1), np.float32), "z": 1.0},
        "no input %z; inputs are %x, %k",
    ),
    "shape": (
        {"x": np.ones((2, 3, 8, 9), np.float32), "k": np.ones((1, 4, 1, 1), np.float32)},
        r"%x has shape \[2, 3, 8, 8\], the array \[2, 3, 8, 9\]",
    ),
    "dtype": (
        {"x": np.ones((2, 3, 8, 8), np.float64), "k": np.ones((1, 4, 1, 1), np.float32)},
        "%x takes float32, not float64",
    ),
    "no array": ({"x": None, "k": np.ones((1, 4, 1, 1), np.float32)}, "%x takes float32, not object"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_named(net: Executable, case: str) -> None:
    feeds, message = BAD[case]
    with pytest.raises(ExecutionError, match=message):
        net.run(None, feeds)


def test_bad_calls_are_named(net: Executable, feeds: dict[str, np.ndarray]) -> None:
    with pytest.raises(ExecutionError, match="3 arrays for 2 inputs"):
        net(feeds["x"], feeds["k"], feeds["k"])
    with pytest.raises(ExecutionError, match="%x is given twice"):
        net(feeds["x"], x=feeds["x"])
    with pytest.raises(ExecutionError, match="no output %nothing; outputs are %flat, %map"):
        net.run(["nothing"], feeds)


def test_a_saved_executable_runs_the_same(net: Executable, feeds: dict[str, np.ndarray], tmp_path: Path) -> None:
    net.save(tmp_path / "net.fusec")
    again = driver.load(tmp_path / "net.fusec", target="h200")
    for array, right in zip(again.run(None, feeds), net.run(None, feeds), strict=True):
        np.testing.assert_array_equal(array, right)


def test_results_go_into_arrays_that_are_given(net: Executable, feeds: dict[str, np.ndarray]) -> None:
    want = net.run(None, feeds)
    names = [spec.name for spec in net.outputs]
    spec = net.outputs[0]
    wide = np.zeros([2 * d for d in spec.shape], spec.dtype)
    mine = wide[tuple(slice(None, None, 2) for _ in spec.shape)]
    got = net.run(None, feeds, out={spec.name: mine})
    assert got[0] is mine
    for array, right in zip(got, want, strict=True):
        np.testing.assert_array_equal(array, right)
    assert not np.shares_memory(got[1], mine)
    net.run(None, {name: -array for name, array in feeds.items()})
    np.testing.assert_array_equal(mine, want[0])
    for bad, words in (
        ({"nothing": mine}, "no output that was asked for"),
        ({names[0]: np.zeros(3, spec.dtype)}, f"out %{names[0]} has shape"),
        ({names[0]: np.zeros(spec.shape, np.float64)}, f"out %{names[0]} takes float32, not float64"),
        ({names[0]: [1.0]}, "cannot be written into list"),
    ):
        with pytest.raises(ExecutionError, match=words):
            net.run(None, feeds, out=bad)


def test_memory_of_values_nobody_reads_again_is_freed(rng: np.random.Generator) -> None:
    """Forty kernels one after the other, with maps of 4 MB: two maps are alive at a time."""
    import tracemalloc

    lines = "\n".join(f"  %r{i + 1} = round(%r{i})" for i in range(40))
    net = executable(f'graph "g" (%r0: f32[1024,1024]) {{\n{lines}\n  return %r40\n}}')
    x = rng.standard_normal((1024, 1024)).astype(np.float32)
    tracemalloc.start()
    net(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * x.nbytes


class Turning(SimulatorBackend):
    """Has kernels that read constants in a memory order of their own."""

    order: tuple[int, ...] = (1, 0)

    def kernel(self, step: Partition, memory: Callable[[Value, TensorType], Any]) -> Callable[[], None]:
        (node,) = step.nodes
        type, result = node.operands[1].type, memory(node.result, node.result.type)
        turned = replace(type, order=self.order)
        x, c = memory(node.operands[0], node.operands[0].type), memory(node.operands[1], turned)

        def run() -> None:
            unpack(result, node.result.type)[...] = unpack(x, type) ** unpack(c, turned)

        return run


def test_constants_are_held_only_as_bound_steps_read_them(rng: np.random.Generator) -> None:
    exponents = rng.uniform(1, 2, (8, 6))
    text = 'graph "g" (%x: f64[8,6]) {\n  %c = constant weight("c") : f64[8,6]\n  %y = pow(%x, %c)\n  return %y\n}'
    net = executable(text, {"c": exponents}, Turning())
    assert not net._constants.arrays, "nothing is bound"

    def director(inputs: Any, works: Any, runs: Any, bound: Callable[[int], Callable[[], None]]) -> list[int]:
        tried = bound(0)
        assert list(orders()) == [(1, 0)]
        net.backend.order = ()  # type: ignore[attr-defined]
        other = bound(0)
        assert sorted(orders()) == [(), (1, 0)]
        del tried, other
        return [0]

    def orders() -> list[tuple[int, ...]]:
        return [order for _, (_, order) in net._constants.arrays]

    net.rehearse(director)
    assert orders() == [()], "what was tried is gone"
    x = rng.uniform(0.5, 1.5, (8, 6))
    assert_close(net(x), x**exponents, 1e-6)
    (held,) = net._constants.arrays.values()
    net.hold_inputs()
    assert_close(net(x), x**exponents, 1e-6)
    assert next(iter(net._constants.arrays.values())) is held, "what is still read is not made anew"


def test_inputs_that_are_held_are_there_after_calls_and_replays(rng: np.random.Generator) -> None:
    text = 'graph "g" (%x: f16[64,64]) {\n' + "".join(
        f"  %{b} = matmul(%{a}, %{a})\n" for a, b in zip("xabcd", "abcde", strict=True)
    )
    net = executable(text + "  return %e\n}")
    x = (rng.standard_normal((64, 64)) / 8).astype(np.float16)
    (want,) = net.run(None, {"x": x})
    net.run(None, {"x": x})
    assert not np.array_equal(net.input_buffers["x"], x), "its memory is used again"
    before = net.memory.nbytes
    net.hold_inputs()
    assert before <= net.memory.nbytes <= before + x.nbytes
    for _ in range(2):
        np.testing.assert_array_equal(net.run(None, {"x": x})[0], want)
        np.testing.assert_array_equal(net.input_buffers["x"], x)
    net.replay()
    net.replay()
    np.testing.assert_array_equal(net.input_buffers["x"], x)
    net.hold_inputs()
    net.replay()  # nothing was let go


def test_a_replay_computes_again_over_the_last_inputs(rng: np.random.Generator) -> None:
    net = executable('graph "g" (%x: f32[4]) {\n  %y = exp(%x)\n  return %y\n}')
    with pytest.raises(ExecutionError, match="before the first call"):
        net.replay()
    x = rng.standard_normal(4).astype(np.float32)
    (want,) = net.run(None, {"x": x})
    (result,) = net.compiled.graph.outputs
    net._places[result][...] = np.nan
    net.replay()
    np.testing.assert_array_equal(net._places[result], want)


def test_inputs_may_be_written_where_they_are_read(rng: np.random.Generator) -> None:
    net = executable('graph "g" (%x: f32[4]) {\n  %y = exp(%x)\n  return %y\n}')
    for _ in range(3):
        x = rng.standard_normal(4).astype(np.float32)
        net.input_buffers["x"][...] = x
        assert_close(net(**net.input_buffers), np.exp(x), 1e-6)


def test_a_call_that_failed_half_way_is_made_again_step_by_step(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = executable('graph "g" (%x: f32[4]) {\n  %y = exp(%x)\n  return %y\n}')
    x = rng.standard_normal(4).astype(np.float32)

    def fails() -> None:
        raise ExecutionError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(net._steps, "bound", lambda step, lowered: fails)
        with pytest.raises(ExecutionError, match="step 0 exp: not now"):
            net(x)
        with pytest.raises(ExecutionError, match="step 0 exp: not now"):
            net(x)
