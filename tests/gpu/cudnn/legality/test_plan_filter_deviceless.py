"""Ask cuDNN, without a GPU, with heuristics, engines and workspace that the caller chooses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu.cudnn_graphs import conv

import fusec
from fusec import driver, lockfile
from fusec.errors import CheckError, FusecError
from fusec.gpu.cudnn.legality.oracle import PROBE, Oracle
from fusec.gpu.cudnn.plans.plan_serialization import Tries, serialize
from fusec.ir import DType, Graph, TensorType
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import Conv, pw
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import Legal, Plan, Refused, Verdict
from fusec.schedule.program import Kind
from fusec.targets.target import load

pytestmark = pytest.mark.cudnn
H200 = load("h200")
GRAPH = conv("bias", "relu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("verdicts") / "verdicts.sqlite")


def judged(store: Store, plan_filter: PlanFilter, graph: CudnnGraph = GRAPH) -> Verdict:
    with Oracle(H200, store=store, workers=1, plan_filter=plan_filter, reuse_builds=True) as oracle:
        (verdict,) = oracle.judge([graph])
    return verdict


def plans(store: Store, plan_filter: PlanFilter, graph: CudnnGraph = GRAPH) -> tuple[Plan, ...]:
    verdict = judged(store, plan_filter, graph)
    assert isinstance(verdict, Legal), verdict
    return verdict.plans


def test_engines_are_left_out_or_insisted_on(store: Store) -> None:
    everything = plans(store, PlanFilter())
    first = everything[0].engine
    rest = plans(store, PlanFilter.of(engines=f"-{first}"))
    assert {p.engine for p in rest} == {p.engine for p in everything} - {first}
    assert any(p.built for p in rest)
    assert {p.engine for p in plans(store, PlanFilter.of(engines=(first,)))} == {first}
    refused = judged(store, PlanFilter.of(engines=(9999,)))
    assert isinstance(refused, Refused) and refused.code == "LEFT_OUT"
    offered = ", ".join(map(str, sorted({p.engine for p in everything})))
    assert refused.message == f"cuDNN offers no other plan: engines {offered} are left out by the option engines"
    assert plans(store, PlanFilter()) == everything, "verdicts with other options are stored apart"


def test_a_probe_that_is_left_out_does_not_stop_the_oracle(tmp_path: Path) -> None:
    engines = {p.engine for p in plans(Store(tmp_path / "one.sqlite"), PlanFilter(), PROBE)}
    without = PlanFilter.of(engines=[f"-{engine}" for engine in engines])
    store = Store(tmp_path / "other.sqlite")
    assert isinstance(judged(store, without, GRAPH), Legal)
    assert isinstance(judged(store, without, PROBE), Refused), "the proof that cuDNN works here is no verdict"


def test_a_workspace_limit_holds_for_each_plan_listed(store: Store) -> None:
    graph = conv("bias", "relu", dtype=DType.F32, tensor_cores=True)
    everything, limited = plans(store, PlanFilter(), graph), plans(store, PlanFilter.of(workspace_limit=0), graph)
    assert {p.workspace_bytes for p in limited} == {0} and all(p.built for p in limited)
    assert 0 < len(limited) < len(everything)
    some = conv("z", "bias", "gelu", dtype=DType.F32)
    (first, *_) = serialize([some], H200, count=1, workers=1)[some.key]
    if first.choice.workspace_bytes:
        limit = first.choice.workspace_bytes - 1
        try_it = Tries(H200, PlanFilter.of(workspace_limit=limit))
        assert not try_it(some, Choice(*first.choice.identity))
        assert Tries(H200)(some, Choice(*first.choice.identity))


def test_modes_of_the_heuristics_list_other_plans(store: Store) -> None:
    listed = {modes: plans(store, PlanFilter.of(modes)) for modes in ("A", "B", "fallback", "A,fallback")}
    assert listed["A,fallback"] == plans(store, PlanFilter())
    identities = {modes: [(p.engine, p.knobs) for p in found] for modes, found in listed.items()}
    assert identities["A"] != identities["fallback"]
    assert len(identities["fallback"]) < len(identities["A,fallback"])


def test_serialized_plans_are_those_of_the_filter() -> None:
    (first, second) = serialize([GRAPH], H200, count=2, workers=1)[GRAPH.key]
    others = serialize(
        [GRAPH], H200, count=2, workers=1, plan_filter=PlanFilter.of(engines=[f"-{first.choice.engine}"])
    )[GRAPH.key]
    assert first.choice.engine not in {entry.choice.engine for entry in others}
    assert second.blob is not None


def model() -> Graph:
    """Make a convolution with bias and relu, channels last in fp16."""
    rng, graph = np.random.default_rng(0), Graph("net")
    x = graph.add_input("x", TensorType((8, 64, 28, 28), DType.F32))
    w = graph.constant(rng.standard_normal((64, 64, 3, 3)).astype(np.float32), "w")
    y = graph.add(Conv((1, 1), (1, 1, 1, 1), (1, 1), 1), x, w)
    graph.set_outputs([graph.add(pw("relu"), y)])
    return graph


def engines(executable: driver.Executable) -> set[int]:
    steps = [step for step in executable.compiled.program.steps if step.kind is Kind.CUDNN]
    return {plan.engine for step in steps if step.verdict is not None for plan in step.verdict.plans}


def compiled(**options: object) -> driver.Executable:
    made = fusec.compile(model(), target="h200", precision="fp16", simulate=True, **options)  # type: ignore[arg-type]
    assert isinstance(made, driver.Executable)
    return made


def test_compile_follows_the_options_and_a_file_remembers_them(tmp_path: Path) -> None:
    free = compiled()
    first = max(engines(free))
    limited = compiled(engines=f"-{first}", heuristics=["A"], workspace_limit=1 << 20)
    assert first not in engines(limited)
    path = tmp_path / "net.fusec"
    limited.save(path)
    again = fusec.load(path, simulate=True)
    assert isinstance(again, driver.Executable)
    wanted = PlanFilter.of(["A"], f"-{first}", 1 << 20)
    assert again.compiled.options.plan_filter == limited.compiled.options.plan_filter == wanted
    with Oracle(H200) as oracle, pytest.raises(FusecError, match="other heuristics, engines or workspace_limit"):
        compiled(engines=f"-{first}", oracle=oracle)


def test_a_lock_whose_plan_is_left_out_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "fusec.lock"
    made = lockfile.make([compiled().compiled])
    lock.write_text(lockfile.text_of(made))
    assert engines(compiled(lock=lock))
    locked = {part.choice.engine for e in made.entries for part in e.parts if part.choice is not None}
    for engine in locked:
        with pytest.raises(CheckError, match=r"write a new lock"):  # the steps differ, or the plan is left out
            compiled(lock=lock, engines=f"-{engine}")
