"""Test that kernels are compiled while cuDNN's workers start, and only then."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Machine
from gpu.test_backend import compiled

from fusec.compiler.compile_ahead import ProposedKernels, candidates_compiled_ahead, compiled_ahead
from fusec.gpu.cudnn.legality.oracle import PROBE, Oracle
from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.launch import cubins
from fusec.gpu.launch.cubins import entry_of, source_of
from fusec.ir import DType, Graph
from fusec.plans.plan_cache import PlanStore
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import Legal
from fusec.targets.target import load

SOFTMAX = """graph "g" (%x: f32[64,96]) {
  %s = softmax(%x) {axis=1}
  %y = erf(%s)
  return %y
}"""


JOINED = """graph "g" (%x: f32[64,96]) {
  %a = relu(%x)
  %b = tanh(%x)
  %c = concat(%a, %b) {axis=1}
  %y = softmax(%c) {axis=1}
  return %y
}"""


def proposed(level: str = "quick", text: str = SOFTMAX) -> ProposedKernels:
    of = compiled(text)
    return ProposedKernels(of.program.graph, of.target, of.options, {}, level)


@needs_compiler
@pytest.mark.parametrize("level", ["quick", "none"])
def test_the_kernels_of_a_program_are_compiled_once(machine: Machine, tmp_path: Path, level: str) -> None:
    from fusec.gpu.backend import CudnnBackend

    ahead = proposed(level)
    ahead.start().join()
    begun = set(machine.compiled_elsewhere)
    assert begun
    backend: Any = CudnnBackend(level, store=PlanStore(tmp_path))
    of = compiled(SOFTMAX)
    program = backend.tune_steps(of.program, True, of.target.launch_us)
    backend._launcher.compile(backend.steps.variants.kernels_of(program.steps, of.figures))
    assert len(machine.compiled_elsewhere) == len(begun), "none twice, and all were known"
    left = set(cubins._AHEAD)
    cubins.forget_ahead()
    assert not left if level == "none" else len(left) < len(begun)


@pytest.mark.parametrize(("text", "is_kept"), [(SOFTMAX, True), (JOINED, False)], ids=["softmax", "concat"])
def test_the_graph_keeps_kernels_unless_concats_change_its_types(
    monkeypatch: pytest.MonkeyPatch, text: str, is_kept: bool
) -> None:
    """Another thread partitions the graph at the same time."""
    monkeypatch.setattr("fusec.compiler.compile_ahead.compile_ahead", lambda *_: None)
    monkeypatch.setattr(ProposedKernels, "warm_up", lambda self, types: None)
    ahead = proposed(text=text)
    before = str(ahead.graph)
    ahead.start().join()
    assert str(ahead.graph) == before
    assert bool(ahead.graph.memo) == is_kept
    ahead.compile(ahead.graph)
    assert (str(ahead.graph) == before) == is_kept


def test_a_failure_is_left_to_the_compilation_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusec.compiler.compile_ahead.partition", lambda *_: 1 / 0)
    ahead = proposed()
    ahead.start().join()
    with pytest.raises(ZeroDivisionError):
        ahead.compile(ahead.graph)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_nothing_is_compiled_ahead_without_questions_or_without_a_gpu(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(ProposedKernels, "start", lambda self: begun.append("started"))
    oracle: Any = SimpleNamespace(device=on_gpu, meanwhile=None)
    ahead = proposed()
    with compiled_ahead(ahead, oracle):
        assert (oracle.meanwhile is not None) == on_gpu
    assert oracle.meanwhile is None and not begun
    with compiled_ahead(ahead, None):
        pass
    with pytest.raises(RuntimeError), compiled_ahead(ahead, oracle):
        raise RuntimeError
    assert oracle.meanwhile is None


def test_all_kernels_are_known_when_the_answers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is still partitioning when cuDNN has answered."""
    answered, known = threading.Event(), threading.Event()

    def compile(self: ProposedKernels, graph: Graph) -> None:
        assert answered.wait(10)
        known.set()

    monkeypatch.setattr(ProposedKernels, "compile", compile)
    monkeypatch.setattr(ProposedKernels, "warm_up", lambda self, types: None)
    oracle: Any = SimpleNamespace(device=True, meanwhile=None)
    with compiled_ahead(proposed(), oracle):
        oracle.meanwhile()
        assert not known.is_set()
        answered.set()
    assert known.is_set()


@pytest.mark.parametrize("fails", [False, True])
def test_what_choosing_plans_needs_is_loaded_when_the_kernels_are_known(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """At the same time the one would hold Python's lock while the other waits for it."""
    done: list[str] = []
    loaded = threading.Event()

    def compile(self: ProposedKernels, graph: Graph) -> None:
        done.append("kernels")
        if fails:
            raise RuntimeError

    def warm_up(self: ProposedKernels, types: frozenset[DType]) -> None:
        done.append("plans")
        loaded.set()

    monkeypatch.setattr(ProposedKernels, "compile", compile)
    monkeypatch.setattr(ProposedKernels, "warm_up", warm_up)
    proposed().start().join()
    assert loaded.wait(10)
    assert done == ["kernels", "plans"]


def test_plans_are_listed_and_small_kernels_compiled_in_advance(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusec.gpu import warm_up

    compiled: list[str] = []
    monkeypatch.setattr(warm_up.timer, "module", lambda: SimpleNamespace(compile=lambda: compiled.append("fusec_gate")))
    monkeypatch.setattr(warm_up, "function_of", lambda source, entry: compiled.append(entry))
    monkeypatch.setattr(warm_up, "compile_ahead", lambda kernels, *_: compiled.extend(each.name for each in kernels))
    listed = len(machine.modes)
    warm_up.warm_up(DType.F16, {DType.F16, DType.F32, DType.I8})
    assert compiled == ["fusec_gate", "fusec_distance_f16", "fusec_distance_i8", "fusec_reorder2", "fusec_reorder4"]
    assert len(machine.modes) == listed + 1
    compiled.clear()
    proposed("none").warm_up(frozenset())
    assert not compiled, "nothing is timed"


@pytest.mark.cudnn
def test_cudnn_has_plans_of_the_graph_that_is_listed_in_advance(tmp_path: Path) -> None:
    from fusec.gpu.warm_up import GRAPH

    with Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1) as oracle:
        assert isinstance(oracle.judge([GRAPH])[0], Legal)


def test_work_for_meanwhile_begins_with_the_first_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    oracle = Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1)
    monkeypatch.setattr(oracle, "start", lambda count: None)
    monkeypatch.setattr(oracle, "_begin_proof", lambda: None)
    monkeypatch.setattr(oracle, "_ask", lambda graphs, report, end: begun.append("asked"))
    oracle.meanwhile = lambda: begun.append("meanwhile")
    oracle.judge([])
    assert begun == []
    oracle.judge([PROBE])
    assert begun == ["meanwhile", "asked"]
    oracle.judge([PROBE])
    assert begun == ["meanwhile", "asked", "asked"]


@pytest.mark.parametrize("known", ["nothing", "a cubin", "the times"])
def test_candidates_of_a_file_are_compiled_unless_the_cache_knows_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    from fusec.gpu.launch import kernel_launcher

    of, begun, loaded = compiled(SOFTMAX), set[str](), list[str]()
    launches = (la for kernel in of.candidate_kernels.values() for each in variants_of(kernel) for la in each.launches)
    every = {source_of(launch, of.target.sm).key for launch in launches}
    stored = min(every)
    monkeypatch.setattr(cubins, "compiled", lambda new, *_: begun.update(each.key for each in new) or {})
    monkeypatch.setattr(kernel_launcher, "load_ahead", lambda variants, coming: loaded.append("begun"))
    cache: Any = SimpleNamespace(
        kernel_variant=lambda key: {"fastest": key} if known == "the times" else {},
        cubin=lambda key: entry_of(key, b"cubin") if known == "a cubin" and key == stored else None,
    )
    with candidates_compiled_ahead(of, cache):
        pass
    assert begun == {"nothing": every, "a cubin": every - {stored}, "the times": set()}[known]
    assert loaded == ["begun"]
