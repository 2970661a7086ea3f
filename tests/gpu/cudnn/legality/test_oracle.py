"""Test cuDNN's verdicts through workers: they are stored, and never poorer than cuDNN's own."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu.cudnn_graphs import conv, conv_feeding_matmul, image, matmul, matrix, pointwise, scalar
from lowering.bodies import BODIES
from lowering.bodies import load as load_body

from fusec.errors import TargetError
from fusec.gpu.cudnn.legality import oracle as oracle_module
from fusec.gpu.cudnn.legality import verdict_keys
from fusec.gpu.cudnn.legality.oracle import PROBE, Oracle
from fusec.gpu.cudnn.legality.verdict_json import decode, encode
from fusec.gpu.cudnn.plans.plan_list import compiles_slowly
from fusec.gpu.cudnn.without_driver.deviceless import cudnn_number
from fusec.gpu.cudnn.worker_processes import worker_process as process
from fusec.gpu.cudnn.worker_processes.worker_process import EndedError
from fusec.ir import DType
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import UNASKED, Legal, Plan, Refused, Verdict
from fusec.system import json_child, machine_locks
from fusec.targets.target import load, names

pytestmark = pytest.mark.cudnn


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("oracle") / "answers.sqlite")


@pytest.fixture(scope="module")
def h200(store: Store) -> Iterator[Oracle]:
    with Oracle(load("h200"), store=store, workers=1) as oracle:
        yield oracle


def legal(verdict: Verdict) -> Legal:
    assert isinstance(verdict, Legal), verdict
    return verdict


def refused(verdict: Verdict) -> Refused:
    assert isinstance(verdict, Refused), verdict
    return verdict


def count(verdict: Verdict) -> tuple[int, int]:
    plans = legal(verdict).plans
    return sum(p.precompiled for p in plans), sum(not p.precompiled for p in plans)


def is_alive(pid: int) -> bool:
    """Tell if the process runs; a zombie counts, because nobody has collected it."""
    return Path(f"/proc/{pid}").exists()


def test_classes_of_convolution_epilogues(h200: Oracle) -> None:
    graphs = [
        conv("bias", "relu"),
        conv("z", "bias", "relu"),
        conv("z_left", "bias", "relu"),
        conv("bias", "z", "relu"),
        conv("relu"),
        conv("bias", "swish"),
    ]
    pre = [count(v) for v in h200.judge(graphs)]
    assert [runtime > 0 for _, runtime in pre] == [True] * 6
    # the bias right before the activation and the residual right after the convolution, or none is precompiled
    assert pre[0][0] > 30
    assert pre[1][0] > 30
    assert [p for p, _ in pre[2:]] == [0, 0, 0, 0]


def test_a_legal_graph_has_a_built_plan_and_no_plan_that_failed(h200: Oracle) -> None:
    for graph in (conv("bias", "relu"), conv("bias", "swish"), pointwise("gelu", (1, 8, 64))):
        plans = legal(h200.judge([graph])[0]).plans
        assert any(p.built for p in plans)
        assert len({(p.engine, p.knobs) for p in plans}) == len(plans)


def scaled(by: float) -> CudnnGraph:
    """A tensor times a number that is passed by value."""
    graph = pointwise("mul", (1, 8, 64), (1, 1, 1))
    return replace(graph, tensors=tuple(scalar(2, by, rank=3) if t.uid == 2 else t for t in graph.tensors))


def test_numbers_by_value_do_not_change_a_verdict(tmp_path: Path) -> None:
    """As the scales of layers that round to 8 bits; cuDNN gets the number when a plan runs."""
    graphs = [scaled(by) for by in (0.5, 0.25, 3.0)]
    store = Store(tmp_path / "answers.sqlite")
    with Oracle(load("h200"), store=store, workers=1, hand_over=True) as oracle:
        first, second = oracle.judge(graphs[:2])
        assert legal(first) is second and oracle.asked == 2, "about the probe, and about one of them"
        assert oracle.judge(graphs) == [first] * 3 and oracle.asked == 2
        assert {oracle.built[graph.key] for graph in graphs} == {oracle.built[graphs[0].key]}
    with Oracle(load("h200"), store=store, workers=1) as oracle:
        assert oracle.judge(graphs) == [first] * 3 and oracle.asked == 0


@pytest.mark.slow
def test_a_plan_built_in_one_size_makes_other_sizes_legal(tmp_path: Path) -> None:
    """If asked for: without a compilation, and not for the disk, whose answers all processes read."""
    sizes = (("gelu", (1, 12, 64)), ("gelu", (1, 16, 64)), ("tanh", (1, 16, 64)))
    small, large, other = (pointwise(mode, dims, result=dims) for mode, dims in sizes)
    assert small.size_free_key == large.size_free_key != other.size_free_key
    assert conv("relu").size_free_key == conv("relu", size=14).size_free_key != conv("bias", "relu").size_free_key
    store = Store(tmp_path / "answers.sqlite")
    with Oracle(load("h200"), store=store, workers=1, reuse_builds=True) as oracle:
        first, second, third = (legal(oracle.judge([graph])[0]) for graph in (small, large, other))
    built = [any(plan.built for plan in verdict.plans) for verdict in (first, second, third)]
    assert built == [True, False, True]
    assert {p.engine for p in second.plans} == {p.engine for p in first.plans}
    kept = [bool(store.get([oracle._entry(graph.key)])) for graph in (small, large, other)]
    assert kept == built
    with Oracle(load("h200"), store=store, workers=1, reuse_builds=True) as oracle:  # from what the disk holds
        oracle.judge([small])
        assert not any(plan.built for plan in legal(oracle.judge([large])[0]).plans)
    with Oracle(load("h200"), store=Store(tmp_path / "other.sqlite"), workers=2, reuse_builds=True) as oracle:
        verdicts = oracle.judge([small, large, other])  # asked about together
        assert not any(plan.built for verdict in verdicts for plan in legal(verdict).plans)  # a sequence of calls is
    with Oracle(load("h200"), store=store, workers=1) as oracle:
        assert any(plan.built for plan in legal(oracle.judge([small, large])[1]).plans)


def test_a_pointwise_graph_of_known_calls_is_listed_and_not_compiled(tmp_path: Path) -> None:
    """Such verdicts are stored, but only for those who accept them."""
    store = Store(tmp_path / "answers.sqlite")
    dims = (1, 12, 64)
    first, second = pointwise("gelu", dims, result=dims), pointwise("gelu", (8, 12, 64), result=(8, 12, 64))
    assert first.size_free_key != second.size_free_key
    with Oracle(load("h200"), store=store, workers=1, reuse_builds=True) as oracle:
        built = [any(p.built for p in legal(oracle.judge([graph])[0]).plans) for graph in (first, second)]
        listed = legal(oracle.judge([second])[0])
    assert built == [True, False]
    with Oracle(load("h200"), store=store, workers=1, reuse_builds=True) as oracle:
        assert oracle.judge([second]) == [listed] and oracle.asked == 0
    with Oracle(load("h200"), store=store, workers=1) as oracle:
        compiled = legal(oracle.judge([second])[0])
        assert oracle.asked == 1 and any(p.built for p in compiled.plans)
    identity = [(p.engine, p.knobs, p.precompiled) for p in compiled.plans]
    assert identity == [(p.engine, p.knobs, p.precompiled) for p in listed.plans]


def test_one_sequence_of_calls_is_compiled_for_all_pointwise_graphs(tmp_path: Path) -> None:
    """It is asked once, and serves graphs of any shape that have its kinds of calls."""
    dims = (1, 12, 64)
    graphs = [pointwise(mode, dims, result=dims) for mode in ("gelu", "tanh", "exp")]
    with Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1, reuse_builds=True) as oracle:
        verdicts = oracle.judge(graphs)
        assert oracle.asked == len(graphs) + 2  # the probe, and the sequence
    assert not any(plan.built for verdict in verdicts for plan in legal(verdict).plans)


def test_an_oracle_without_time_answers_what_is_stored(tmp_path: Path) -> None:
    """A question that was not asked is not stored, so that it can be asked later."""
    store = Store(tmp_path / "answers.sqlite")
    first, second = pointwise("exp", (1, 8, 64)), pointwise("neg", (1, 8, 64))
    with Oracle(load("h200"), store=store, workers=1) as oracle:
        assert oracle.judge([first], end=time.monotonic()) == [UNASKED] and oracle.asked == 0
        (known,) = oracle.judge([first])
        assert oracle.judge([first, second], end=time.monotonic()) == [known, UNASKED]
    with Oracle(load("h200"), store=store, workers=1) as oracle:
        assert oracle.judge([first, second], end=time.monotonic()) == [known, UNASKED] and oracle.asked == 0
        assert isinstance(oracle.judge([second])[0], Legal)


def test_an_oracle_stops_between_two_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(oracle_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def put(self: Oracle, *_: object) -> Legal:
        now[0] += 1.0
        return Legal(())

    monkeypatch.setattr(Oracle, "_put", put)
    monkeypatch.setattr(Oracle, "_begin_proof", lambda self: None)
    monkeypatch.setattr(Oracle, "start", lambda self, count: None)
    graphs = [pointwise(mode, (1, 8, 64)) for mode in ("exp", "neg", "relu", "tanh")]
    with Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1) as oracle:
        assert oracle.judge(graphs, end=2.0) == [Legal(()), Legal(()), UNASKED, UNASKED]


def test_a_graph_whose_lock_is_that_of_the_proof_waits_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is claimed until the proof is there, and the proof may begin after that."""
    monkeypatch.setattr(machine_locks, "FILES", 1)
    claimed, put, prove = threading.Event(), Oracle._put, Oracle._prove_once

    def put_late(self: Oracle, *arguments: Any) -> Any:
        claimed.set()
        return put(self, *arguments)

    def prove_late(self: Oracle, *arguments: Any) -> None:
        assert claimed.wait(60)
        prove(self, *arguments)

    monkeypatch.setattr(Oracle, "_put", put_late)
    monkeypatch.setattr(Oracle, "_prove_once", prove_late)
    found: list[Verdict] = []

    def judge() -> None:
        with Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1) as oracle:
            found.extend(oracle.judge([pointwise("exp", (1, 8, 64))]))

    thread = threading.Thread(target=judge, daemon=True)
    thread.start()
    thread.join(120)
    if thread.is_alive():  # let both go on, or pytest itself never ends
        monkeypatch.setattr(machine_locks._OpenFiles, "lock_again", lambda self: -1)
        thread.join(60)
        pytest.fail("the proof waits for a graph that waits for the proof")
    assert [type(verdict) for verdict in found] == [Legal]


def test_an_oracle_that_is_closed_waits_no_longer_for_the_proof_of_another_process(tmp_path: Path) -> None:
    with Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1) as oracle:
        with oracle.locks.claim(PROBE.key, lambda: None, "proof"):  # as another process that proves
            oracle._begin_proof()
            proof = oracle._proof_result
            assert proof is not None
            oracle.close()
            with pytest.raises(EndedError):
                proof.result(60)
        assert isinstance(oracle.judge([pointwise("exp", (1, 8, 64))])[0], Legal), "and proves when it goes on"


def test_processes_that_start_together_ask_each_question_once(tmp_path: Path) -> None:
    """Locks on files exclude two oracles of one process as they exclude two processes."""
    store = tmp_path / "answers.sqlite"
    graphs = [pointwise(mode, (1, 8, 64)) for mode in ("exp", "neg", "gelu", "tanh")]
    with (
        Oracle(load("h200"), store=Store(store), workers=1) as one,
        Oracle(load("h200"), store=Store(store), workers=1) as other,
    ):
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(lambda oracle: oracle.judge(graphs), (one, other))
        assert first == second
        assert one.asked + other.asked == len(graphs) + 1, "the graphs, and the probe"


def test_plans_built_to_judge_are_handed_over(tmp_path: Path) -> None:
    graphs = [conv("bias", "relu"), pointwise("gelu", (1, 8, 64)), pointwise("relu", (1, 9, 64))]
    store = Store(tmp_path / "answers.sqlite")
    with Oracle(load("h200"), store=store, workers=1, hand_over=True) as oracle:
        verdicts = oracle.judge(graphs)
        assert set(oracle.built) - {PROBE.key} == {graph.key for graph in graphs[:2]}, "the third is refused"
        for graph, verdict in zip(graphs[:2], verdicts, strict=False):
            plan, blob = oracle.built[graph.key]
            assert plan == legal(verdict).plans[0] and plan.built
            assert len(blob) > 1000
    with Oracle(load("h200"), store=store, workers=1, hand_over=True) as oracle:
        oracle.judge(graphs)
        assert oracle.built == {}, "what is remembered is not built"


def test_the_plan_that_is_compiled_soonest_is_handed_over(tmp_path: Path) -> None:
    """For a convolution of 8-bit integers, cuDNN's first plan takes many times as long to compile."""
    text = BODIES["integer conv, scale, bias, integer residual, relu, rounded"]
    for few, many in (("2,8,9,7", "2,64,9,7"), ("2,16,9,7", "2,64,9,7"), ("16,8,3", "64,64,3"), ("1,16,1", "1,64,1")):
        text = text.replace(few, many)
    graph = lower(load_body(text), True).graph
    store = Store(tmp_path / "answers.sqlite")
    with Oracle(load("h200"), store=store, workers=1, hand_over=True) as oracle:
        offered = legal(oracle.judge([graph])[0]).plans
    plan, blob = oracle.built[graph.key]
    assert plan.built and len(blob) > 1000 and not compiles_slowly(graph, plan.engine)
    is_slow = compiles_slowly(graph, offered[0].engine)
    assert is_slow or cudnn_number() != "91900", "the release that this is known of; newer ones may list another first"
    assert (plan in offered[1:]) == is_slow
    assert not compiles_slowly(conv("bias"), offered[0].engine)


def test_true_fp32_excludes_plans_with_tensor_cores(h200: Oracle) -> None:
    loose, strict = h200.judge(
        [conv("bias", "relu", dtype=DType.F32), conv("bias", "relu", dtype=DType.F32, tensor_cores=False)]
    )
    assert 0 < len(legal(strict).plans) < len(legal(loose).plans)
    assert all(p.built for p in legal(strict).plans)  # the exclusion shows only when a plan is built
    product = matmul((1, 8, 64), (1, 64, 16), (1, 8, 16), DType.F32)
    only_tf32 = CudnnGraph(product.tensors, product.calls, tensor_cores=False)
    accepted, excluded = h200.judge([product, only_tf32])
    assert legal(accepted).kind == "runtime"
    assert "tf32" in refused(excluded).message


def test_refusals_have_stage_code_and_the_reason_of_the_engine(h200: Oracle) -> None:
    pooled = CudnnGraph(
        (image(1, (8, 64, 28, 28)), image(2, (8, 64, 1, 1), DType.F32)), (CudnnCall("reduction", (1,), (2,), "add"),)
    )
    wrong = matmul((1, 8, 64), (1, 64, 16), (1, 8, 24))
    cast = CudnnGraph(
        (matrix(1, (1, 8, 64), DType.I64), matrix(2, (1, 8, 64))),
        (CudnnCall("pointwise", (1,), (2,), "identity"),),
    )
    verdicts = [refused(v) for v in h200.judge([pooled, wrong, cast])]
    assert [v.stage for v in verdicts] == ["plan", "build_operation_graph", "build"]
    assert verdicts[0].code == "CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN"
    assert "isColumnReduction" in verdicts[0].message
    assert "finalize_internal" not in verdicts[0].message
    assert verdicts[1].code == "CUDNN_STATUS_BAD_PARAM"
    assert "COMPILATION_FAILED" in verdicts[2].code
    assert all(len(v.message) < 500 for v in verdicts)


@pytest.mark.parametrize("name", names())
def test_every_target_answers(name: str, store: Store) -> None:
    with Oracle(load(name), store=store, workers=1) as oracle:
        fast, fused, half = oracle.judge([conv("bias", "relu"), conv("bias", "swish"), conv("bias", dtype=DType.BF16)])
    assert count(fast)[0] > 10
    assert count(fused)[1] > 0
    if name == "t4":
        assert "ARCH_MISMATCH" in refused(half).code  # bf16 came with compute capability 8.0
        assert "bf16" in refused(half).message
    else:
        assert count(half)[0] > 5


def test_verdicts_are_stored_in_memory_and_on_disk(tmp_path: Path) -> None:
    store = Store(tmp_path / "answers.sqlite")
    graphs = [conv("bias", "relu", filters=k) for k in (32, 64)]
    with Oracle(load("h200"), store=store, workers=2) as first:
        answers = first.judge([*graphs, graphs[0]])
        asked = first.asked
        assert asked == 3  # two graphs and the probe; the third is equal to the first
        assert first.judge(graphs) == answers[:2]
        assert first.asked == asked
    with Oracle(load("h200"), store=store) as second:
        assert second.judge(graphs) == answers[:2]
        assert second.asked == 0
        assert not second._all  # not even a worker was started
    with Oracle(load("h100"), store=store, workers=1) as other:
        other.judge(graphs[:1])
        assert other.asked == 2  # another target is another question


def test_hazards_are_refused_without_a_worker(tmp_path: Path) -> None:
    oracle = Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"))
    verdict = refused(oracle.judge([conv_feeding_matmul()])[0])
    assert (verdict.stage, verdict.code) == ("validate", "FUSEC_HAZARD")
    assert oracle.asked == 0


def test_a_graph_that_kills_cudnn_is_a_refusal_and_the_rest_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle_module, "deadly", lambda graph: None)
    store = Store(tmp_path / "answers.sqlite")
    with Oracle(load("h200"), store=store, workers=1) as oracle:
        killed, alive = oracle.judge([conv_feeding_matmul(), conv("bias", "relu")])
    assert refused(killed) == Refused("crash", "SIGSEGV", "cuDNN killed its process with SIGSEGV")
    assert count(alive)[0] > 30
    with Oracle(load("h200"), store=store) as again:  # it is remembered: nobody crashes it twice
        assert again.judge([conv_feeding_matmul()]) == [killed]
        assert again.asked == 0


def test_a_worker_killed_from_outside_is_asked_again(tmp_path: Path) -> None:
    with Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1) as oracle:
        oracle.judge([conv("bias")])
        (worker,) = oracle._all
        os.kill(worker.pid, signal.SIGKILL)
        assert count(oracle.judge([conv("bias", "relu")])[0])[0] > 30
        assert not is_alive(worker.pid)


def test_a_timeout_is_a_refusal_that_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "answers.sqlite")
    graph = conv("bias", "relu", filters=96)
    with Oracle(load("h200"), store=store, workers=1) as oracle:
        oracle.judge([conv("bias")])
        known = len(store)
        (worker,) = oracle._all
        os.kill(worker.pid, signal.SIGSTOP)
        monkeypatch.setattr(process, "TIMEOUT_S", 0.2)
        verdict = refused(oracle.judge([graph])[0])
        assert verdict.stage == "crash"
        assert "no answer in" in verdict.message
        assert len(store) == known


def test_a_defect_of_fusec_is_an_exception_and_not_stored(tmp_path: Path) -> None:
    store = Store(tmp_path / "answers.sqlite")
    good = conv("bias", "relu")
    # a call without the window attributes is nothing the lowering makes
    bad = CudnnGraph(
        good.tensors, (CudnnCall("conv_fprop", (1, 2), (3,), attributes=(("nonsense", 1),)), *good.calls[1:])
    )
    with Oracle(load("h200"), store=store, workers=1) as oracle:
        with pytest.raises(RuntimeError, match="nonsense"):
            oracle.judge([bad])
        assert store.get([oracle._entry(bad.key)]) == {}
        assert count(oracle.judge([good])[0])[0] > 30  # it goes on


def test_missing_libraries_are_an_error_and_never_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "answers.sqlite")
    with Oracle(load("h200"), store=store, workers=1) as oracle:
        # NVRTC is there and does not work: cuDNN would offer the runtime engines and then build none
        no = Refused("build", "CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED", "no")
        monkeypatch.setattr(oracle, "_put", lambda graph, epoch, plan_filter=None: no)
        with pytest.raises(TargetError, match="runtime-compiled engines do not come up for h200"):
            oracle.judge([conv("bias", "relu")])
    assert len(store) == 0


def test_workers_start_early_only_where_nothing_was_asked(tmp_path: Path) -> None:
    store = Store(tmp_path / "answers.sqlite")
    with Oracle(load("h200"), store=store, workers=2) as oracle:
        oracle.start_if_new()
        assert oracle._all or oracle._starting
        oracle.close()  # the proof ends with its workers, and is no verdict about cuDNN
        assert isinstance(oracle.judge([conv("bias", "relu")])[0], Legal)
        assert store.get([oracle._proof])
    with Oracle(load("h200"), store=store, workers=2) as oracle:
        oracle.start_if_new()
        assert not oracle._all and not oracle._starting


def test_a_worker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_child, "_START", "raise SystemExit('no such luck')")
    with (
        Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1) as oracle,
        pytest.raises(TargetError, match=r"no such luck.*fusec doctor"),
    ):
        oracle.judge([conv("bias")])


def test_workers_end_with_the_oracle(tmp_path: Path) -> None:
    oracle = Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=2)
    oracle.judge([conv("bias", filters=k) for k in (16, 32, 48, 64)])
    pids = [worker.pid for worker in oracle._all]
    assert 1 <= len(pids) <= 2
    assert all(map(is_alive, pids))
    oracle.close()
    assert not any(map(is_alive, pids))
    oracle.judge([conv("bias", filters=80)])  # it may be asked again
    (worker,) = oracle._all
    pid = worker.pid
    del oracle, worker
    gc.collect()
    assert not is_alive(pid)


def test_workers_start_in_parallel_and_not_after_close(tmp_path: Path) -> None:
    oracle = Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=2)

    def up() -> None:
        with oracle._changed:
            assert oracle._changed.wait_for(lambda: oracle._starting == 0, 60)

    oracle.start(5)
    assert oracle._starting == 2, "the limit, and nobody waits"
    legal(oracle.judge([conv("bias", filters=16)])[0])
    up()
    assert len(oracle._all) == 2, "who asks takes what comes up"
    oracle.start()
    assert oracle._starting == 0
    oracle.close()
    oracle.start(1)
    oracle.close()
    up()
    assert oracle._all == [] == oracle._idle


def test_environment_variables_that_change_verdicts_do_not_reach_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, h200: Oracle
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    graph = conv("bias", "relu", dtype=DType.F32)
    with Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1) as oracle:
        assert count(oracle.judge([graph])[0]) == count(h200.judge([graph])[0])


def test_stored_verdicts_take_no_time(h200: Oracle, store: Store) -> None:
    graphs = [conv("bias", "relu"), PROBE]
    h200.judge(graphs)
    start = time.perf_counter()
    Oracle(load("h200"), store=store).judge(graphs)
    assert time.perf_counter() - start < 1.0  # milliseconds; a worker would take more than this


def test_verdicts_survive_the_store() -> None:
    plan = Plan(48, ((1, 2), (3, 4)), precompiled=True, workspace_bytes=131, built=True)
    for verdict in (Legal((plan, Plan(0, (), False))), Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "why\nnot")):
        assert decode(json.loads(json.dumps(encode(verdict)))) == verdict


def test_the_number_of_workers_is_that_of_the_cores_or_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEC_WORKERS", raising=False)
    for cores, workers in ((1, 1), (3, 3), (64, 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        assert Oracle(load("h200")).workers == workers
    on_a_gpu = {name: Oracle(load(name), device=True).workers for name in ("t4", "a100", "h200")}
    assert on_a_gpu == {"t4": 4, "a100": 8, "h200": 8}, "contexts leave a small GPU its memory"
    monkeypatch.setenv("FUSEC_WORKERS", "12")
    assert Oracle(load("h200")).workers == Oracle(load("t4"), device=True).workers == 12
    for wrong in ("0", "many", "-1"):
        monkeypatch.setenv("FUSEC_WORKERS", wrong)
        with pytest.raises(TargetError, match="FUSEC_WORKERS is a number of processes, 1 or more, not"):
            Oracle(load("h200"))


def test_stored_verdicts_are_of_the_rules_that_left_plans_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict stored before a rule was added still has the plans that the rule leaves out."""

    def key() -> str:
        verdict_keys._rules_digest.cache_clear()
        return verdict_keys.verdict_environment(load("h200"), False)

    before = key()
    assert key() == before
    for source in Path(verdict_keys.known_bugs.__file__).parent.glob("*.py"):
        (tmp_path / source.name).write_bytes(source.read_bytes() + b"# one more rule\n")
    monkeypatch.setattr(verdict_keys.known_bugs, "__file__", str(tmp_path / "__init__.py"))
    assert key() != before
    monkeypatch.undo()
    assert key() == before
