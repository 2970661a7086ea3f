"""Test the GPU backend on stand-ins for CuPy and cuDNN: what is chosen, captured, replayed and replaced."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.autotune.dense_block import dense_block
from gpu.autotune.squeeze_excite_text import EXCITATION, drawn
from gpu.kernels.cases import FIGURES, assert_same, last
from gpu.kernels.cases import build as build_case
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import PROCESSORS, Array, Machine, on_device
from helpers import assert_close, cudnn_backend, one_program
from lowering.lowers_judge import LowersJudge

from fusec.errors import CheckError, ExecutionError
from fusec.execution.compilation import Compiled
from fusec.execution.shape_family import ShapeFamily
from fusec.gpu.autotune.cache.tuning_cache import KnownChoices
from fusec.gpu.cudnn.legality.judges import CudnnJudge
from fusec.ir import DType, TensorType
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.packing import pack, unpack
from fusec.ops import BatchNormTrain, Concat, Conv, pw
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.passes.partition.concat_in_place import concat_in_place
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice, Entry
from fusec.plans.verdict import Plan
from fusec.reference import evaluate
from fusec.runtime import Executable, SimulatorBackend
from fusec.schedule.program import Kind
from fusec.targets.target import load
from fusec.text import parse

pytest.importorskip("cupy")
pytest.importorskip("cudnn")

TEXT = """graph "g" (%x: f32[2,8,4,4]{0,2,3,1}) {
  %b = constant [1.0, 2.0, 3.0, 4.0, -1.0, -2.0, -3.0, 0.5] : f32[8,1,1]
  %a = add(%x, %b)
  %r = relu(%a)
  %m = mul(%r, %r)
  return %m, %r
}"""


def compiled(text: str = TEXT) -> Compiled:
    graph, target, judge = parse(text), load("h200"), LowersJudge()
    return Compiled(graph, partition(graph, judge, target), target, Options(), judge)


def build(path: Path, tune: str = "quick", text: str = TEXT) -> Any:
    from fusec.gpu.backend import CudnnBackend

    return Executable(compiled(text), CudnnBackend(tune, store=PlanStore(path)))


def fresh(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 8, 4, 4)).astype(np.float32)


def check(net: Executable, seed: int) -> None:
    x = fresh(seed)
    want = Executable(compiled(), SimulatorBackend()).run(None, {"x": x})
    got = net.run(None, {"x": x})
    for array, right in zip(got, want, strict=True):
        assert type(array) is np.ndarray
        np.testing.assert_array_equal(array, right)


def test_the_first_call_runs_step_by_step_and_later_ones_are_one_graph(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path)
    check(net, 0)
    assert (machine.captured, machine.replayed) == (0, 0)
    for seed in (1, 2, 3):
        check(net, seed)
    assert (machine.captured, machine.replayed) == (1, 3)


def test_arrays_on_the_device_stay_there(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path)
    for seed in (0, 1, 2):
        x = fresh(seed)
        m, r = net.run(None, {"x": on_device(x)})
        assert hasattr(m, "get")
        np.testing.assert_array_equal(m.get(), r.get() ** 2)
        np.testing.assert_array_equal(r.get(), np.maximum(x + np.array(TEXT_BIAS).reshape(8, 1, 1), 0))
    host = np.zeros((2, 8, 4, 4), np.float32)
    net.run(["r"], {"x": on_device(x)}, out={"r": host})
    np.testing.assert_array_equal(host, r.get())


def test_a_recorded_call_is_queued_on_its_callers_stream(machine: Machine, tmp_path: Path) -> None:
    net, own = build(tmp_path, text=TEXT.replace("{0,2,3,1}", "")), 1
    x, y = on_device(fresh(0)), on_device(np.zeros((2, 8, 4, 4), np.float32))
    caller = net.backend.xp.cuda.get_current_stream()
    for _ in range(2):  # step by step, then recorded: on the own stream, which waits for the caller's and is waited for
        machine.waits.clear()
        net.run(["r"], {"x": x})
        assert machine.waits[-2:] == [(own, caller.ptr), (caller.ptr, own)]
    machine.waits.clear()
    net.run(["r"], {"x": x})
    assert machine.waits == [(caller.ptr, own)], "the call before was on another stream"
    machine.waits.clear()
    machine.copied.clear()
    net.run(["r"], {"x": x}, out={"r": y})
    assert machine.waits == [], "nothing to wait for on one stream"
    assert machine.copied == [(3, caller.ptr)] * 2, "in and out, immediately and nothing more"
    assert machine.replayed_on[-2:] == [caller.ptr] * 2
    machine.current = other = net.backend.xp.cuda.Stream()
    net.run(["r"], {"x": x})
    assert machine.waits == [(other.ptr, caller.ptr)], "calls share memory: one after the other"
    machine.copied.clear()
    net.run(["r"], {"x": fresh(1)})
    assert machine.copied == [(1, other.ptr), (2, other.ptr)], "from the host and back, without a copy between"
    net.time_us(1)
    assert machine.replayed_on[-1] == own
    np.testing.assert_array_equal(y.get(), np.maximum(fresh(0) + TEXT_BIAS.reshape(8, 1, 1), 0))


@needs_compiler
def test_the_first_kernel_reads_the_callers_own_array(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path, text=KERNELS)

    def fresh(seed: int) -> np.ndarray:
        memory = np.empty((2, 6, 6, 8), np.float32)
        memory[...] = np.random.default_rng(seed).standard_normal(memory.shape)
        return memory.transpose(0, 3, 1, 2)

    def check(x: Any, device: Any) -> None:
        want = Executable(compiled(KERNELS), SimulatorBackend()).run(None, {"x": x})
        for got, right in zip(net.run(None, {"x": device}), want, strict=True):
            assert_close(got.get() if hasattr(got, "get") else got, right, 1e-6)

    for seed in range(4):
        machine.copied.clear()
        x = fresh(seed)
        check(x, x.view(Array))
        if seed > 1:
            assert [kind for kind, _ in machine.copied] == [3, 3], "the results alone"
    assert not net._replay.ahead._instead, "the caller's array is not kept"
    machine.copied.clear()
    check(fresh(5), fresh(5))
    assert [kind for kind, _ in machine.copied] == [1, 2, 2], "what is on the host is copied"
    memory = np.empty(2 * 8 * 6 * 6 + 1, np.float32)
    odd = memory[1:].reshape(2, 6, 6, 8).transpose(0, 3, 1, 2)
    odd[...] = fresh(6)
    machine.copied.clear()
    check(fresh(6), odd.view(Array))
    assert [kind for kind, _ in machine.copied] == [3, 3, 3], "what is not aligned, too"
    rows = np.ascontiguousarray(fresh(7))
    check(fresh(7), rows.view(Array))
    net.hold_inputs()
    for seed in range(3):
        x = fresh(seed)
        check(x, x.view(Array))
        net.replay()
        np.testing.assert_array_equal(net.input_buffers["x"].get(), x)


def test_inputs_written_into_the_models_memory_are_not_copied(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path, text=TEXT.replace("{0,2,3,1}", ""))
    buffers = net.input_buffers
    assert [(name, array.shape) for name, array in buffers.items()] == [("x", (2, 8, 4, 4))]
    for seed in range(3):
        buffers["x"][...] = fresh(seed)
        machine.copied.clear()
        (r,) = net.run(["r"], buffers)
        np.testing.assert_array_equal(r.get(), np.maximum(fresh(seed) + TEXT_BIAS.reshape(8, 1, 1), 0))
        assert [kind for kind, _ in machine.copied] == [3], "the result alone"


def test_a_call_that_fails_leaves_the_next_one_free(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path)
    x = on_device(fresh(0))
    for _ in range(2):
        net.run(None, {"x": x})
    limit, machine.limit = machine.limit, machine.allocated
    with pytest.raises(ExecutionError, match="out of memory while running the model"):
        net.run(None, {"x": x})
    machine.limit = limit
    check(net, 1)


def test_an_error_of_the_device_names_the_step(machine: Machine, tmp_path: Path) -> None:
    """After a lost context every call fails; the first error is reported."""
    net = build(tmp_path, "none")
    fault = net.backend.xp.cuda.runtime.CUDARuntimeError("cudaErrorIllegalAddress")

    def fails(*_: Any) -> None:
        raise fault

    streams = net.backend._streams
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(streams.done, "record", fails)
        patched.setattr(type(streams.own), "synchronize", fails)
        patched.setattr(net.backend, "give_up", lambda *_: False)
        with pytest.raises(ExecutionError, match=r"step 0 bias.*: the GPU reported an error: cudaErrorIllegalAddress"):
            net.run(None, {"x": fresh(0)})
    for seed in range(2):
        check(net, seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(net.backend.xp.cuda.runtime, "memcpyAsync", fails)
        patched.setattr(net._replay, "_parts", [types.SimpleNamespace(launch=fails)])
        with pytest.raises(ExecutionError, match="the GPU reported an error while running the model: cudaError"):
            net.run(None, {"x": on_device(fresh(0))})
    check(net, 2)


TEXT_BIAS = np.array([1.0, 2.0, 3.0, 4.0, -1.0, -2.0, -3.0, 0.5], np.float32)


def test_the_fastest_plan_is_chosen_and_remembered(machine: Machine, tmp_path: Path) -> None:
    machine.times_us = {7: 30.0, 4: 20.0, 3: 5.0}
    first = build(tmp_path)
    assert {choice.engine for choice in first.backend.choices().values()} == {3}
    assert {choice.time_us for choice in first.backend.choices().values()} == {5.0}
    check(first, 0)
    machine.built.clear()
    second = build(tmp_path)
    assert second.backend.choices() == first.backend.choices()
    assert (machine.built, machine.revived[-1]) == ([], 3), "what is known is neither built nor timed again"
    check(second, 1)
    assert {c.engine for c in build(tmp_path, "none").backend.choices().values()} == {7}


def test_suggested_choices_are_used_unless_all_plans_are_timed(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    (key,) = {lowered.graph.key for lowered in compiled().lowered if lowered is not None}
    for tune, time_us, engine in (("none", None, 3), ("quick", 5.0, 3), ("quick", None, 3), ("full", None, 7)):
        store = PlanStore(tmp_path / f"{tune} {time_us}")
        machine.times_us = {7: 5.0, 4: 20.0, 3: 30.0}
        suggested = {key: [Entry(Choice(3, ((2, 2),), 128, time_us))]}
        net = Executable(compiled(), CudnnBackend(tune, store=store, known=KnownChoices(suggested)))
        assert {choice.engine for choice in cudnn_backend(net).choices().values()} == {engine}


def test_a_wrong_plan_is_never_used(machine: Machine, tmp_path: Path) -> None:
    machine.times_us, machine.wrong = {7: 30.0, 4: 20.0, 3: 5.0}, {3}
    net = build(tmp_path)
    assert {choice.engine for choice in net.backend.choices().values()} == {4}
    check(net, 0)
    machine.wrong = set()
    assert {c.engine for c in build(tmp_path, "full").backend.choices().values()} == {4}, "it is in quarantine"


def test_a_plan_that_fails_is_replaced_in_a_running_model(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path)
    (engine,) = {choice.engine for choice in net.backend.choices().values()}
    machine.failing = {engine}
    with pytest.warns(UserWarning, match=f"engine {engine} failed, so the next plan"):
        check(net, 0)
    assert engine not in {choice.engine for choice in net.backend.choices().values()}
    check(net, 1)


def test_when_no_plan_is_left_the_step_is_named(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path, "none")
    machine.failing = set(machine.engines)
    failed = pytest.raises(ExecutionError, match=r"step 0 .*: cuDNN failed")
    with failed, pytest.warns(UserWarning, match="engine 7 failed, so the next plan"):
        net.run(None, {"x": fresh(0)})


KERNELS = """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}) {
  %p = max_pool(%x) {window=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], dilations=[1, 1]} : f32[2,8,3,3]{0,2,3,1}
  %m = reduce(%p) {kind="mean", axes=[2, 3]} : f32[2,8,1,1]{0,2,3,1}
  %s = softmax(%m) {axis=1} : f32[2,8,1,1]{0,2,3,1}
  return %p, %s
}"""


@needs_compiler
def test_ops_that_cudnn_lacks_run_as_kernels(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path, text=KERNELS)
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((2, 8, 6, 6)).astype(np.float32)
        want = Executable(compiled(KERNELS), SimulatorBackend()).run(None, {"x": x})
        for got, right in zip(net.run(None, {"x": x}), want, strict=True):
            assert_close(got, right, 1e-6)
    assert {entry.rsplit("_", 1)[0] for entry in machine.launched} == {"max_pool", "reduce", "softmax"}
    assert machine.replayed == 2, "kernels are captured with the rest"
    assert {step.signature for step in net.kernels} == {"max_pool", "reduce", "softmax"}


@needs_compiler
def test_a_kernel_that_nvrtc_refuses_is_replaced_by_the_reference(machine: Machine, tmp_path: Path) -> None:
    machine.refused_word = "softmax"
    with pytest.warns(UserWarning, match=r"NVRTC refuses the kernel for softmax, it is not used: .*undefined"):
        net = build(tmp_path, text=KERNELS)
    (softmax,) = (step for step in net.compiled.program.steps if step.signature == "softmax")

    def memory(value: Any, type: Any) -> Any:
        raise AssertionError("nothing is bound")

    assert net.backend.kernel(softmax, memory) is None, "the reference runs it, and nobody is warned again"


@needs_compiler
def test_the_fastest_variant_of_a_kernel_is_chosen(machine: Machine) -> None:
    from fusec.gpu.launch.kernel_launcher import Launcher
    from fusec.gpu.measure.random_inputs import RandomInputs

    conv = Conv((1, 1), (2, 2, 2, 2), (1, 1), 8)
    case = build_case(
        "dw", [last(DType.F32, 2, 8, 8, 8), last(DType.F32, 8, 1, 5, 5)], lambda g, x, w: g.add(conv, x, w)
    )
    kernel, launcher = case.kernel, Launcher()
    assert kernel is not None and len(kernel.others) > 1 and not launcher.is_measured(kernel)
    times = iter([5.0, 3.0, 1.0, *[9.0] * len(kernel.others)])
    known: list[float] = []

    def timed(run: Callable[[], None], best_us: float) -> float:
        known.append(best_us)
        run()
        return next(times)

    assert launcher.measure(kernel, timed) == 1.0
    assert known == [float("inf"), 5.0, 3.0, *[1.0] * (len(kernel.others) - 2)], "the least time so far"
    entries = [each.launches[0].entry for each in (kernel, *kernel.others)]
    assert machine.launched == [*entries, entries[2], entries[1]], "the fastest and the next are compared"
    assert launcher.is_measured(kernel)
    launcher.bind(kernel, RandomInputs().memory)()
    assert machine.launched[-1] == kernel.others[1].launches[0].entry


def _ways_of_relu(*wrong: int) -> tuple[Any, Any]:
    """A kernel with two others of the same work, of which those computes something else."""
    case = build_case("relu", [last(DType.F16, 2, 8, 6, 6)], lambda g, x: g.add(pw("relu"), x))
    assert case.kernel is not None
    every: list[Any] = []
    for number in range(3):
        (launch,) = case.kernel.launches
        source = launch.source.replace(launch.entry, f"{launch.entry}_{number}")
        if number in wrong:
            source = source.replace("{", f"{{ if (threadIdx.x == {number}u) return;", 1)
        every.append(replace(case.kernel, launches=(replace(launch, entry=f"{launch.entry}_{number}", source=source),)))
    return replace(every[0], others=tuple(every[1:])), every


@needs_compiler
def test_a_way_that_computes_something_else_is_not_taken(machine: Machine) -> None:
    from fusec.gpu.launch.kernel_launcher import Launcher

    kernel, every = _ways_of_relu(2)
    launcher, times = Launcher(), iter([5.0, 3.0, 1.0])
    with pytest.warns(UserWarning, match="a variant of relu computes other results than the others"):
        assert launcher.measure(kernel, lambda run, best_us: (run(), next(times))[1]) == 3.0
    assert launcher.fastest(kernel).key == every[1].key and launcher.runs(kernel)
    assert launcher.times_us(kernel) == [5.0, 3.0, float("inf")]
    assert launcher.agree(every[0], every[1]) and not launcher.agree(every[0], every[2])


@needs_compiler
def test_a_kernel_no_two_ways_of_which_agree_is_not_run(machine: Machine) -> None:
    from fusec.gpu.launch.kernel_launcher import Launcher

    kernel, every = _ways_of_relu(1, 2)
    launcher, times = Launcher(), iter([5.0, 3.0, 1.0])
    with pytest.warns(UserWarning, match="computes other results than the others"):
        assert launcher.measure(kernel, lambda run, best_us: (run(), next(times))[1]) == float("inf")
    assert not launcher.runs(kernel) and not any(map(launcher.runs, every))


@needs_compiler
@pytest.mark.parametrize("blocks", [PROCESSORS, PROCESSORS + 1])
def test_blocks_that_meet_are_launched_where_there_is_room_for_all(
    machine: Machine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """A variant that was fastest elsewhere, and has no room here, is replaced with a log record."""
    from fusec.gpu.kernels.norm.batch_norm import batch_norm
    from fusec.gpu.launch.kernel_launcher import Launcher

    monkeypatch.setattr(batch_norm, "VARIANTS", ((64, 4, 8),))
    x, p, fits = last(DType.F16, 4, 8, 12, 20), TensorType((8,), DType.F32), blocks == PROCESSORS
    case = build_case("norm", [x, p, p], lambda g, *v: g.insert(BatchNormTrain(), list(v)).results)
    case = replace(case, figures=replace(FIGURES, processors=blocks))
    kernel, launcher = case.kernel, Launcher()
    assert kernel is not None
    (once,) = kernel.others
    assert once.launches[0].cooperative and once.launches[0].grid == blocks
    assert launcher.runs(once) == fits
    times = iter([5.0, 3.0])
    assert launcher.measure(kernel, lambda run, best_us: (run(), next(times))[1]) == (3.0 if fits else 5.0)
    launcher.take(kernel, once.key)
    if not fits:
        with pytest.warns(UserWarning, match="that was fastest does not run on this GPU"):
            assert launcher.runs(kernel)
    arrays = {v: array + array.dtype.type(0.5) for v, array in case.arrays(rng).items()}
    held = {v: on_device(pack(np, arrays[v], v.type).view(np.uint8)) for v in case.graph.inputs}
    held |= {v: on_device(np.zeros(v.type.nbytes, np.uint8)) for v in case.outputs}
    for _ in range(2):  # barrier counters are as they were
        launcher.bind(kernel, lambda value, _: held[value])()
    got = [unpack(held[v].get().view(v.type.dtype.numpy), v.type) for v in case.outputs]
    assert_same(case, got, case.reference(arrays))


@needs_compiler
def test_steps_of_a_file_made_without_a_gpu_are_fused(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusec import driver

    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    of = compiled(KERNELS.replace("%p, %s", "%r, %s").replace("  return", "  %r = relu(%p)\n  return"))
    Executable(of, SimulatorBackend()).save(tmp_path / "model.fusec")
    monkeypatch.setattr(driver.device, "is_present", lambda target: True)
    monkeypatch.setattr(driver.device, "detect", lambda: load("h200"))
    net = driver.load(tmp_path / "model.fusec", tune="none")
    assert [step.signature for step in net.compiled.program.steps] == ["max_pool+relu", "reduce", "softmax"]
    net.save(tmp_path / "again.fusec")
    again = driver.load_artifact(tmp_path / "again.fusec").compiled.program
    assert [(s.signature, s.kind) for s in again.steps] == [(s.signature, s.kind) for s in net.compiled.program.steps]
    x = np.random.default_rng(0).standard_normal((2, 8, 6, 6)).astype(np.float32)
    for got, right in zip(net.run(None, {"x": x}), Executable(of, SimulatorBackend()).run(None, {"x": x}), strict=True):
        assert_close(got, right, 1e-6)


@needs_compiler
def test_kernels_compete_with_plans_and_are_fused(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    of = compiled(KERNELS.replace("%p, %s", "%r, %s").replace("  return", "  %r = relu(%p)\n  return"))
    backend = CudnnBackend("quick", store=PlanStore(tmp_path))
    program = backend.tune_steps(of.program, True, 1.0)
    assert [step.signature for step in program.steps] == ["max_pool+relu", "reduce", "softmax"]
    net = Executable(replace(of, program=program), backend)
    x = np.random.default_rng(0).standard_normal((2, 8, 6, 6)).astype(np.float32)
    want = Executable(of, SimulatorBackend()).run(None, {"x": x})
    for got, right in zip(net.run(None, {"x": x}), want, strict=True):
        assert_close(got, right, 1e-6)
    assert any(entry.startswith("pointwise") for entry in machine.launched) is False
    alone = backend.tune_steps(compiled().program, True, 1.0)
    assert [step.kind.value for step in alone.steps] == ["kernel"], "the stand-in's kernels take no time"


@needs_compiler
@pytest.mark.parametrize("tune", ["none", "quick"])
def test_a_squeeze_and_excitation_runs_as_one_kernel_and_is_known_the_next_time(
    machine: Machine, tmp_path: Path, tune: str
) -> None:
    from fusec.gpu.backend import CudnnBackend

    graph, target, judge = parse(EXCITATION, drawn(EXCITATION)), load("h200"), LowersJudge()
    of = Compiled(graph, partition(graph, judge, target), target, Options(), judge)
    x = np.random.default_rng(0).standard_normal((2, 8, 6, 6)).astype(np.float32)
    (want,) = Executable(of, SimulatorBackend()).run(None, {"x": x})
    for _ in range(2):
        backend = CudnnBackend(tune, store=PlanStore(tmp_path))
        program = backend.tune_steps(of.program, True, 1.0)
        assert program.steps[0].signature == "conv+bias+swish+reduce+conv+relu+conv+sigmoid"
        net = Executable(replace(of, program=program), backend)
        machine.launched.clear()
        (got,) = net.run(None, {"x": x})
        assert_close(got, want, 1e-5)
        steps = [entry.split("_")[0] for entry in machine.launched if not entry.startswith("fusec")]  # copies weights
        assert steps[:2] == ["depthwise", "gate"]


@needs_compiler
def test_concats_in_place_are_written_and_read_by_kernels_and_plans(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    judge, target, source = LowersJudge(), load("h200"), dense_block(1, 16, 2, 16, 2)
    graph = run(PIPELINE, source.clone(), Options())
    program = concat_in_place(partition(graph, judge, target), judge, Options())
    joins = [step.kind for step in program.steps if isinstance(step.nodes[0].op, Concat)]
    assert joins == [Kind.VIEW] * 2
    backend = CudnnBackend("quick", store=PlanStore(tmp_path))
    of = Compiled(source, backend.tune_steps(program, True, 1.0), target, Options(), judge)
    net = Executable(of, backend)
    assert any(any(v.type.within for v in step.outputs) for step in of.program.steps if step.kind is Kind.KERNEL)
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((1, 16, 4, 4)).astype(np.float32)
        (got,) = net.run(None, {"x": x})
        assert_close(got, evaluate(source, {"x": x})["y"], 1e-5)
    assert machine.replayed == 2


def test_no_plan_at_all_is_an_error_with_the_graph(machine: Machine, tmp_path: Path) -> None:
    machine.engines = ()
    with pytest.raises(ExecutionError, match=r"cuDNN built no plan on this GPU(.|\n)*pointwise\.add"):
        build(tmp_path)


@pytest.mark.parametrize("how", ["refuses", "spoils"])
@pytest.mark.parametrize("where", [(), (0,), (2,), (4,), (1, 2), (0, 1, 2, 3, 4)])
def test_steps_that_cannot_be_captured_run_between_graphs(
    machine: Machine, tmp_path: Path, how: str, where: tuple[int, ...]
) -> None:
    from fusec.gpu.backend import CudnnBackend

    backend, done = CudnnBackend("none", store=PlanStore(tmp_path)), list[int]()

    def step(index: int) -> Callable[[], None]:
        def work() -> None:
            done.append(index)

        def run() -> None:
            if machine.recording is not None and index in where and how == "refuses":
                raise NotImplementedError("not while a stream is captured")
            machine.do(work)

        if index in where and how == "spoils":
            machine.uncapturable.append(work)
        return run

    replay = backend.capture([step(index) for index in range(5)])
    assert done == []
    for _ in range(2):
        done.clear()
        replay()
        assert done == [0, 1, 2, 3, 4]
    assert bool(replay.declined) == bool(where)
    assert not where or "cannot be captured: " in replay.declined
    alone: dict[tuple[int, ...], int] = {(): 1, (0,): 1, (2,): 2, (4,): 1, (1, 2): 2, (0, 1, 2, 3, 4): 0}
    least = 2 * alone[where]
    assert machine.replayed == least or (how == "spoils" and machine.replayed >= least)


FORKS = """graph "g" (%x: f32[2,8,4,4], %z: f32[3,8,4,4]) {
  %a = exp(%x)
  %b = tanh(%z)
  %c = sqrt(%a)
  %d = neg(%b)
  %e = concat(%c, %d) {axis=0}
  %f = relu(%e)
  return %f
}"""


@pytest.mark.parametrize("faster", [True, False])
def test_parallel_steps_are_used_where_they_are_faster(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    net = build(tmp_path, text=FORKS)

    def time_us(run: Any, count: int) -> list[float]:
        run()
        return [5.0 if (run.lanes > 1) == faster else 7.0] * count

    monkeypatch.setattr(net.backend, "_capture", replace(net.backend._capture, time_us=time_us))
    rng = np.random.default_rng(0)
    feeds = {"x": np.exp(rng.standard_normal((2, 8, 4, 4))), "z": rng.standard_normal((3, 8, 4, 4))}
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    want = Executable(compiled(FORKS), SimulatorBackend()).run(None, feeds)
    for _ in range(3):
        np.testing.assert_array_equal(net.run(None, feeds)[0], want[0])
    assert net._replay.lanes == (2 if faster else 1)
    assert net._replay.times_us == (5.0, 7.0)
    assert machine.captured == 2
    assert {stream for stream in machine.cudnn_streams if stream != 1}, "plans were put on another stream"
    assert machine.cudnn_streams[-1] == 1


@needs_compiler
@pytest.mark.parametrize("faster", [True, False])
def test_a_lock_says_whether_steps_run_side_by_side(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    """The lock times both orders if no call was made; later nothing is timed, with the lock or a file."""
    from fusec import driver, lockfile
    from fusec.gpu.backend import CudnnBackend

    forks = FORKS.replace(", %z: f32[3,8,4,4]", "").replace("%z", "%x")  # no kernel runs ahead of the graph
    forks = forks.replace("return %f", "return %f, %c, %d")  # and none runs all of it
    _at_hand(tmp_path, monkeypatch, forks)

    def time_us(backend: Any, run: Any, count: int, alone: bool = False) -> list[float]:
        run()
        return [5.0 if (run.lanes > 1) == faster else 7.0] * count

    monkeypatch.setattr(CudnnBackend, "time_us", time_us)
    net = one_program(driver.compile("model"))
    lock = net.lock()
    order = next(entry for entry in lock.entries if entry.name == "model")
    assert order.split[0].runs == ("side by side" if faster else "in order")
    lockfile.write(tmp_path / "fusec.lock", lock)
    net.save(tmp_path / "model.fusec")
    if faster:
        monkeypatch.setattr(CudnnBackend, "time_us", None)
    locked = one_program(driver.compile("model", lock=tmp_path / "fusec.lock"))
    loaded = one_program(driver.load(tmp_path / "model.fusec"))
    feeds = {"x": np.exp(fresh(0))}
    want = Executable(compiled(forks), SimulatorBackend()).run(None, feeds)
    for one in (net, locked, loaded):
        for _ in range(3):
            assert_close(one.run(None, feeds)[0], want[0], 1e-6)
        assert one.recorded[0] == (2 if faster else 1)
    assert locked.recorded[1] is None, "the other way was not timed"
    assert locked.lock().entries == lock.entries


def test_out_of_memory_is_a_clear_error(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path)
    machine.limit = machine.allocated
    with pytest.raises(ExecutionError, match=r"out of memory while running the model: .* MB of \d+ MB are free"):
        net.run(None, {"x": fresh(0)})


def test_the_program_runs_the_fastest_candidates(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    backend = CudnnBackend("full", store=PlanStore(tmp_path))
    of = compiled()
    program = backend.tune_steps(of.program, True, 1.0)
    assert [step.signature for step in program.steps] == [step.signature for step in of.program.steps]


def test_times_come_from_events(machine: Machine, tmp_path: Path) -> None:
    machine.times_us = dict.fromkeys(machine.engines, 12.0)
    net = build(tmp_path)
    check(net, 0)
    check(net, 1)
    whole, steps = net.time_us(5)
    launches = sum(lowered is not None for lowered in net.compiled.lowered)
    assert whole == pytest.approx([12.0 * launches] * 5)
    assert len(steps) == len(net.compiled.program.steps)


def test_a_locked_plan_is_used(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec import driver, lockfile

    of = compiled()
    _at_hand(tmp_path, monkeypatch, TEXT)
    (key,) = {lowered.graph.key for lowered in of.lowered if lowered is not None}

    def locked(engine: int) -> Executable:
        lock = lockfile.make([of], {("h200", key): [Entry(Choice(engine, ((2, 2),)))]})
        lockfile.write(tmp_path / "fusec.lock", lock)
        machine.built.clear()
        machine.now_us = 0.0
        return one_program(driver.compile("model", lock=tmp_path / "fusec.lock"))

    for _ in range(2):
        net = locked(3)
        assert {c.engine for c in cudnn_backend(net).choices().values()} == {3}
    assert (machine.built, machine.now_us) == ([], 0.0), "nothing is timed, and what was built is kept"
    check(locked(3), 0)
    with pytest.raises(CheckError, match=r"fusec\.lock: engine 9 does not build on this GPU"):
        locked(9)


@needs_compiler
def test_locked_choices_are_used_without_timing(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusec import driver, lockfile
    from fusec.gpu.launch.kernel_launcher import Launcher

    text = KERNELS.replace("%p, %s", "%r, %s, %q").replace(
        "  return", "  %r = relu(%p)\n  %a = add(%x, %x)\n  %q = relu(%a)\n  return"
    )
    _at_hand(tmp_path, monkeypatch, text)
    slow = Launcher.measure

    def measured(self: Any, kernel: Any, time_us: Any) -> float:
        took = slow(self, kernel, time_us)
        self._fastest[kernel.key] = len(kernel.others)  # the last
        return took

    monkeypatch.setattr(Launcher, "measure", measured)
    net = one_program(driver.compile("model"))
    steps = [(s.signature, s.kind.value) for s in net.compiled.program.steps]
    assert ("add+relu", "kernel") in steps, "the stand-in's kernels take no time"
    lock = net.lock()
    lockfile.write(tmp_path / "fusec.lock", lock)
    named = {entry.name: entry.parts[0].kernel for entry in lock.entries if entry.name != "model"}
    assert set(named) == {name for name, _ in steps}
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(Launcher, "measure", None)  # nobody asks
    machine.now_us = 0.0
    again = one_program(driver.compile("model", lock=tmp_path / "fusec.lock"))
    assert [(s.signature, s.kind.value) for s in again.compiled.program.steps] == steps
    assert machine.now_us == 0.0
    assert again.lock().entries == lock.entries
    again.save(tmp_path / "model.fusec")
    assert driver.load_artifact(tmp_path / "model.fusec").lock.entries == lock.entries
    loaded = one_program(driver.load(tmp_path / "model.fusec"))
    x = np.random.default_rng(0).standard_normal((2, 8, 6, 6)).astype(np.float32)
    want = Executable(compiled(text), SimulatorBackend()).run(None, {"x": x})
    for one in (net, again, loaded):
        one._called = False  # to find out how to run side by side, the lock may have run it
        machine.launched.clear()
        for got, right in zip(one.run(None, {"x": x}), want, strict=True):
            assert_close(got, right, 1e-6)
        assert {entry.split(":")[0] for entry in named.values()} == set(machine.launched)


def _at_hand(path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Stand for a compiler that returns this text, on a machine with a GPU."""
    from fusec import driver
    from fusec.compiler import compile_model

    monkeypatch.setattr(compile_model, "read_model", lambda model, shapes: model)
    monkeypatch.setattr(compile_model, "build_program", lambda *_, **__: compiled(text))
    monkeypatch.setattr(driver.device, "is_present", lambda target: True)
    monkeypatch.setattr(driver.device, "detect", lambda: load("h200"))
    monkeypatch.setenv("FUSEC_CACHE", str(path))


@pytest.mark.parametrize(("compiled_late", "needs_sizes"), [(True, False), (True, True), (False, False)])
def test_graphs_without_precompiled_plans_share_kernels(
    machine: Machine, tmp_path: Path, compiled_late: bool, needs_sizes: bool
) -> None:
    from fusec.gpu.backend import CudnnBackend

    machine.runtime_compiled, machine.needs_sizes = compiled_late, needs_sizes
    net = Executable(compiled(), CudnnBackend("none", store=PlanStore(tmp_path), kernel_cache="cache"))
    assert [kernels for _, kernels in machine.emitted] == ([None, "cache"] if compiled_late else [None])
    check(net, 0)
    (tuned,) = cudnn_backend(net).plans.ranked.values()
    assert tuned.plans[0][1].pygraph.kernels == ("cache" if compiled_late and not needs_sizes else None)
    machine.built.clear()
    check(Executable(compiled(), CudnnBackend("none", store=PlanStore(tmp_path), kernel_cache="cache")), 1)
    assert machine.built == [] and machine.revived, "the next time they are revived, shared or not"


@pytest.mark.parametrize("tune", ["none", "quick"])
def test_nondeterministic_plans_are_left_out_where_the_caller_asks_for_it(
    machine: Machine, tmp_path: Path, tune: str
) -> None:
    from fusec.gpu.backend import CudnnBackend

    machine.times_us, machine.unordered = {7: 1.0, 4: 20.0, 3: 5.0}, {7}
    store = PlanStore(tmp_path)

    def engine(deterministic: bool) -> int:
        net = Executable(
            compiled(), CudnnBackend(tune, store=store, plan_filter=PlanFilter(deterministic=deterministic))
        )
        check(net, 0)
        (choice,) = net.backend.choices().values()  # type: ignore[attr-defined]
        return choice.engine

    assert engine(False) == 7
    assert engine(True) == (4 if tune == "none" else 3), "what was chosen before is not taken"
    assert engine(False) == 7


def test_a_program_with_only_nondeterministic_plans_is_an_error(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    machine.unordered = set(machine.engines)
    with pytest.raises(ExecutionError, match="Deselecting execution plan"):
        Executable(
            compiled(), CudnnBackend("none", store=PlanStore(tmp_path), plan_filter=PlanFilter(deterministic=True))
        )


class Workers:
    """An oracle whose processes many models share; it says who ended them."""

    target, workers, plan_filter = load("h200"), 1, PlanFilter()

    def __init__(self) -> None:
        self.built: dict[str, Any] = {}
        self.closed: list[str] = []

    def start_if_new(self) -> None:
        pass

    def plans(self, graph: CudnnGraph) -> tuple[Plan, ...]:
        return ()

    def assumed_from(self, graph: CudnnGraph) -> CudnnGraph | None:
        return None

    def close(self) -> None:
        self.closed.append(threading.current_thread().name)


@pytest.mark.parametrize("shared", [True, False])
def test_workers_end_with_the_model_unless_they_are_shared(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    from fusec import driver
    from fusec.compiler import choose_judge

    crew = Workers()
    _at_hand(tmp_path, monkeypatch, TEXT)
    monkeypatch.setattr(choose_judge, "Oracle", lambda *_, **__: crew)
    net = one_program(driver.compile(parse(TEXT), tune="none", oracle=crew if shared else None))  # type: ignore[arg-type]  # a stand-in
    for thread in [t for t in threading.enumerate() if t.name == "fusec-end-builders"]:
        thread.join()
    assert crew.closed == ([] if shared else ["fusec-end-builders"])
    check(net, 0)


@pytest.mark.parametrize("own", [{}, {"transfers": True}, {"share_kernels": True}], ids=["", "transfers", "kernels"])
def test_programs_that_share_weights_share_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    """Unless plans of other shapes or kernels of this process take the place of what workers build."""
    from fusec.compiler import choose_judge

    made: list[Workers] = []
    monkeypatch.setattr(choose_judge, "Oracle", lambda *_, **__: made.append(Workers()) or made[-1])
    family, plans = ShapeFamily(**own), PlanFilter()
    found = [choose_judge.start_workers(load("h200"), True, plans, family=family) for _ in range(2)]
    if own:
        assert [each.oracle for each in found] == [None, None]
        return
    assert len(made) == 1
    assert all(each.oracle is made[0] and each.builders(plans) is not None for each in found)
    judge = choose_judge.choose_judge(load("h200"), Options(), found[0].oracle, family)
    assert isinstance(judge, CudnnJudge)
    assert judge.oracle is made[0]
    assert choose_judge.choose_judge(load("h200"), Options(), found[1].oracle, family) is judge
