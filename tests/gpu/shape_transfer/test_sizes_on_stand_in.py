"""Test a second input shape on a stand-in GPU: what is transferred from the first, and what if that is wrong."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.kernels.emulator import needs_compiler
from gpu.models.test_integrations import check, fresh, net
from gpu.stand_in_gpu import Machine
from helpers import one_program

import fusec
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import Legal, Plan, Refused, Verdict

pytest.importorskip("cupy")
pytest.importorskip("cudnn")
pytestmark = needs_compiler


class Workers(Oracle):
    """An oracle whose workers are the machine: what it is asked, and what it refuses."""

    def __init__(self, machine: Machine, target: Any, path: Path, **options: Any) -> None:
        super().__init__(target, store=Store(path / "answers.sqlite"), **options)
        self.machine = machine
        self.questions: list[tuple[CudnnGraph, bool]] = []
        self.judged: list[CudnnGraph] = []
        self.refuses: set[int] = set()  # batches for which neither a plan is built nor a graph legal
        self.started = 0

    def _begin_proof(self) -> None:
        pass

    def start(self, count: int | None = None) -> None:
        self.started += count is None  # for sizes to come

    def _put(self, graph: CudnnGraph, epoch: int, plan_filter: PlanFilter | None = None) -> Verdict:
        self.judged.append(graph)
        if self._refused(graph):
            return Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "of that size")
        return Legal(tuple(Plan(e, ((2, i),), True, 64 * i, True) for i, e in enumerate(self.machine.engines)))

    def _refused(self, graph: CudnnGraph) -> bool:
        return any(d in self.refuses for tensor in graph.tensors for d in tensor.dims)

    def exchange(self, question: dict[str, Any], worker: Any = None, epoch: int | None = None) -> Any:
        graph = CudnnGraph.from_json(question["graph"])
        self.questions.append((graph, question["all_sizes"]))
        if self._refused(graph):
            return {"failed": "of that size"}, worker
        choice = Choice.from_json(question["choice"])
        made = self.machine.emit(graph)
        made.selected = self.machine.engines.index(choice.engine)
        self.machine.emitted.pop()
        blob = base64.b64encode(bytes(made.serialize())).decode()
        return {"choice": choice.to_json(), "blob": blob}, worker


@pytest.fixture
def workers(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Workers]:
    from fusec.compiler import choose_judge
    from fusec.execution import shape_family
    from fusec.gpu import device
    from fusec.gpu.launch import cupy_arrays

    made: list[Workers] = []

    def oracle(target: Any, *, device: bool, **options: Any) -> Workers:
        made.append(Workers(machine, target, tmp_path, **options))
        return made[-1]

    monkeypatch.setattr(cupy_arrays, "cupy", machine.cupy())
    monkeypatch.setattr(shape_family, "Oracle", oracle)
    monkeypatch.setattr(choose_judge, "Oracle", oracle)
    monkeypatch.setattr(device, "_first_gpu", lambda: ("NVIDIA H200", 90))
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    return made


def run(exe: Any, batch: int) -> None:
    x = fresh(batch)
    for _ in range(2):
        check(exe.run(None, {"x": x}), x)


def test_workers_build_the_plans_of_the_next_size_without_asking_cudnn(
    machine: Machine, workers: list[Workers]
) -> None:
    exe = fusec.compile_dynamic(net(), tune="none")
    run(exe, 4)
    (oracle,) = workers
    assert oracle.judged and machine.emitted
    assert (oracle.questions, oracle.started) == ([], 1)
    for batch in (6, 16, 3):
        oracle.judged.clear()
        oracle.questions.clear()
        machine.emitted.clear()
        machine.revived.clear()
        run(exe, batch)
        assert oracle.judged == []
        assert machine.emitted == [], "no plan is looked for here"
        assert len(oracle.questions) == len(machine.revived) > 0
        program = one_program(exe.at({"x": (batch, 32)}))
        first = one_program(exe.at({"x": (4, 32)}))
        assert [s.signature for s in program.compiled.program.steps] == [
            s.signature for s in first.compiled.program.steps
        ]
        engines = [c.engine for c in program.backend.choices().values()]  # type: ignore[attr-defined]  # a GPU's
        assert engines == [c.engine for c in first.backend.choices().values()]  # type: ignore[attr-defined]
    oracle.questions.clear()
    run(fusec.compile_dynamic(net(), tune="none"), 4)
    assert oracle.questions == []


def test_a_size_assumed_legal_that_is_refused_is_partitioned_again(machine: Machine, workers: list[Workers]) -> None:
    exe = fusec.compile_dynamic(net(), tune="none")
    run(exe, 4)
    (oracle,) = workers
    oracle.refuses = {7}
    oracle.judged.clear()
    check(exe.run(None, {"x": fresh(7)}), fresh(7))  # once: the machine does not capture what NumPy computes
    assert oracle.judged, "now cuDNN is asked about it"
    assert exe.at({"x": (7, 32)}).backend.choices() == {}  # type: ignore[attr-defined]  # cuDNN runs nothing
    assert exe.at({"x": (4, 32)}).backend.choices()  # type: ignore[attr-defined]
    run(exe, 8)


def test_nothing_is_prepared_for_a_model_of_one_size(machine: Machine, workers: list[Workers]) -> None:
    from frontends.onnx.models import info, model
    from onnx import helper

    held = {"w": np.eye(32, dtype=np.float32)}
    one = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [info("x", [4, 32])], [info("y", [4, 32])], held)
    x = fresh(4)
    got = fusec.compile_dynamic(one, tune="none")(x)
    np.testing.assert_allclose(got, x, rtol=1e-5)
    assert [oracle.started for oracle in workers] == [0]


def test_choices_are_transferred_to_near_sizes(machine: Machine, workers: list[Workers]) -> None:
    machine.times_us = {7: 30.0, 4: 10.0, 3: 20.0}
    exe = fusec.compile_dynamic(net(), tune="quick")
    run(exe, 4)
    (oracle,) = workers
    first = one_program(exe.at({"x": (4, 32)}))
    assert {c.engine for c in first.backend.choices().values()} == {4}  # type: ignore[attr-defined]  # a GPU's
    assert oracle.started == 1
    for batch in (6, 16):
        oracle.questions.clear()
        machine.emitted.clear()
        run(exe, batch)
        program = one_program(exe.at({"x": (batch, 32)}))
        assert machine.emitted == [], "nothing is timed"
        assert oracle.questions
        assert {c.engine for c in program.backend.choices().values()} == {4}  # type: ignore[attr-defined]
        assert program.compiled.tuned is not None
        assert [s.signature for s in program.compiled.program.steps] == [
            s.signature for s in first.compiled.program.steps
        ]
    machine.emitted.clear()
    run(exe, 17)
    assert machine.emitted, "more than four times as large"
    machine.emitted.clear()
    run(exe, 60)
    assert machine.emitted == [], "near that one"


def test_each_size_is_tuned_where_the_caller_asks_for_it(machine: Machine, workers: list[Workers]) -> None:
    exe = fusec.compile_dynamic(net(), tune="quick", tune_each=True)
    run(exe, 4)
    machine.emitted.clear()
    run(exe, 6)
    assert machine.emitted
    assert (workers[0].questions, workers[0].started) == ([], 0)


def test_a_session_transfers_or_tunes_as_its_options_say(machine: Machine, workers: list[Workers]) -> None:
    for tune_each in (False, True):
        session = fusec.InferenceSession(net(), tune="quick", tune_each=tune_each)
        for batch in (5, 10):
            machine.emitted.clear()
            check(session.run(None, {"x": fresh(batch)}), fresh(batch))
        assert bool(workers[-1].questions) is not tune_each
        assert workers[-1].started == (not tune_each)


def test_a_size_is_tuned_where_a_transferred_plan_does_not_build(machine: Machine, workers: list[Workers]) -> None:
    exe = fusec.compile_dynamic(net(), tune="quick")
    run(exe, 4)
    (oracle,) = workers
    oracle.refuses = {6}
    oracle._put = lambda graph, ended=None: Legal((Plan(7, ((2, 0),), True, 0, True),))  # type: ignore[method-assign]  # legal after all
    machine.emitted.clear()
    run(exe, 6)
    assert machine.emitted, "here, by name or by measuring"
