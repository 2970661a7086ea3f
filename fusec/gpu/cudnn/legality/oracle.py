"""Ask worker processes if cuDNN graphs are legal for a target, and store the verdicts.

In a worker, `graph_check` finds the answer. A graph that kills its worker is a refusal.
"""

from __future__ import annotations

import base64
import json
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from fusec.errors import TargetError
from fusec.gpu.cudnn.legality.equal_compilations import wait_for_equal
from fusec.gpu.cudnn.legality.similar_graphs import BuiltPlans, SimilarGraphs, factor
from fusec.gpu.cudnn.legality.verdict_json import decode, encode
from fusec.gpu.cudnn.legality.verdict_keys import is_listed, lasts, verdict_environment
from fusec.gpu.cudnn.worker_processes.worker_pool import WorkerPool
from fusec.gpu.cudnn.worker_processes.worker_process import EndedError, WorkerDeath
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.known_bugs import deadly, misread
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import UNASKED, Legal, Plan, Refused, Verdict
from fusec.targets.target import Target

# The smallest graph that only a runtime-compiled engine runs. If it is refused, those engines do not work on this
# machine, and verdicts would be wrong.
PROBE = CudnnGraph(
    (CudnnTensor(1, (1, 8, 64), (512, 64, 1), DType.F16), CudnnTensor(2, (1, 8, 64), (512, 64, 1), DType.F16)),
    (CudnnCall("pointwise", (1,), (2,), "relu"),),
)
PROOF = "proof"  # kind of the claim on the probe


class Oracle(WorkerPool):
    """Worker processes that judge graphs for one target.

    Verdicts are stored in memory and in `store`, by graph, target and the versions of cuDNN, its frontend and NVRTC.

    store: where verdicts are stored; default: the cache folder
    workers, device: see `WorkerPool`
    reuse_builds: a graph is also legal if the first plan that cuDNN offers was built for other graphs that show that it
        builds: see `BuiltPlans`. That takes milliseconds instead of a compilation. Such verdicts are stored apart.
    hand_over: `built` holds a plan of each graph that was asked about, with its serialized form: cuDNN's first, or the
        one that is compiled soonest
    max_factor: a graph is also legal, without asking, if a legal one differs in size by at most this factor; 0: never.
        Such verdicts stay in memory, and `ask_again` takes one back.
    plan_filter: the plans that may be used; default: all. Verdicts with another filter are stored apart.

    asked: how many graphs cuDNN was asked about
    meanwhile: is called once, before the next question that a worker answers

    Raises TargetError when a part is missing that correct verdicts need.
    """

    def __init__(
        self,
        target: Target,
        *,
        store: Store | None = None,
        workers: int | None = None,
        device: bool = False,
        reuse_builds: bool = False,
        hand_over: bool = False,
        max_factor: float = 0.0,
        plan_filter: PlanFilter | None = None,
    ):
        self._store = store if store is not None else Store()
        super().__init__(target, self._store.path.parent, workers=workers, device=device)
        self.asked = 0
        self.meanwhile: Callable[[], None] | None = None
        self._reuse_builds = reuse_builds
        self._hand_over = hand_over
        self.built: dict[str, tuple[Plan, bytes]] = {}  # by key of the graph
        self._built_plans = BuiltPlans()
        self._memory: dict[str, Verdict] = {}
        self._judged: dict[Hashable, str] = {}  # by `CudnnGraph.number_free_key`: the key of a graph with a verdict
        self.plan_filter = plan_filter or PlanFilter()
        self._proof = f"{verdict_environment(target, device)}:{PROBE.key}"  # entry of the probe, which takes any plan
        self._environment = verdict_environment(target, device, self.plan_filter)
        self._proof_result: Future[None] | None = None
        self._proof_epoch = 0
        # a larger graph needs a larger workspace
        self._similar = SimilarGraphs() if max_factor and self.plan_filter.workspace_limit is None else None
        self._max_factor = max_factor
        self._assumed: dict[str, CudnnGraph] = {}  # by key of a graph assumed to be legal: the similar one
        self._asked_again: set[str] = set()

    def judge(self, graphs: Sequence[CudnnGraph], end: float = math.inf) -> list[Verdict]:
        """Return one verdict per graph, in order; equal graphs are judged once.

        end: when to stop asking, of `time.monotonic`; the verdict of the graphs that are left is UNASKED.
            Where `close` ended the workers first, it is a refusal that says so.
        """
        new = self._unknown(graphs)
        if new and self.device and self._waited(new.values(), end):
            new = self._unknown(graphs)
        passing: dict[Hashable, Verdict] = {}  # by `CudnnGraph.number_free_key`: verdicts that hold for this call alone
        if new and time.monotonic() < end:
            self.start(len(new))
            self._begin_proof()
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile is not None:
                meanwhile()
            self._learn(graphs)  # from verdicts stored on disk
            rounds = [list(new.values())]
            if self._reuse_builds:
                proofs = [] if self.plan_filter.needs_builds else self._built_plans.proofs(new.values())
                self._ask(proofs, lambda graph, verdict: None, end)
                self._learn(proofs)
                rounds = self._built_plans.rounds(new.values())

            def arrived(graph: CudnnGraph, verdict: Verdict) -> None:
                passing[graph.number_free_key] = verdict

            for some in rounds:
                self._learn(graphs)  # from the round before
                self._ask(some, arrived, end)
        self._learn(graphs)
        for graph in graphs:
            if graph.key not in self._memory:
                self._copy(graph)
            asked = graph.key not in self._assumed
            if self._similar is not None and asked and isinstance(self._memory.get(graph.key), Legal):
                self._similar.add(graph)
        return [self._memory.get(g.key) or passing.get(g.number_free_key, UNASKED) for g in graphs]

    def _waited(self, graphs: Iterable[CudnnGraph], end: float) -> bool:
        """Wait for another process that compiles what needs these verdicts; False if there is none."""
        epoch = self._epoch
        return wait_for_equal(graphs, self.locks, lambda: self.require_open(epoch), end)

    def _unknown(self, graphs: Sequence[CudnnGraph]) -> dict[str, CudnnGraph]:
        """Select the graphs to ask about, by key: one of those that differ in numbers by value alone."""
        new = {g.key: g for g in graphs if g.key not in self._memory}
        for key, graph in list(new.items()):
            hazard = deadly(graph) or misread(graph)
            if hazard:
                self._memory[key] = Refused("validate", "FUSEC_HAZARD", hazard)
                del new[key]
        if new:
            for graph, verdict in self._stored(list(new.values())).items():
                self._note({graph: verdict})
                del new[graph.key]
        for key, graph in list(new.items()):
            if self._copy(graph) or self._assume(graph):
                del new[key]
        first: dict[Hashable, CudnnGraph] = {}
        for graph in new.values():
            first.setdefault(graph.number_free_key, graph)
        return {graph.key: graph for graph in first.values()}

    def _stored(self, graphs: list[CudnnGraph]) -> dict[CudnnGraph, Verdict]:
        """Read verdicts from the disk, those for everyone first."""
        entries = {self._entry(graph.key): graph for graph in graphs}
        listed = {self._entry(graph.key, listed=True): graph for graph in graphs if self._reads_listed}
        texts = self._store.get([*entries, *listed])
        found = {graph: texts[key] for key, graph in (listed | entries).items() if key in texts}
        return {graph: decode(json.loads(text)) for graph, text in found.items()}

    def _copy(self, graph: CudnnGraph) -> bool:
        """Take over the verdict on a graph that differs in numbers by value alone; False if there is none."""
        known = self._judged.get(graph.number_free_key, "")
        if known not in self._memory or graph.key in self._asked_again:
            return False
        self._memory[graph.key] = self._memory[known]
        if known in self.built:
            self.built[graph.key] = self.built[known]
        return True

    @property
    def _reads_listed(self) -> bool:
        """Tell if verdicts without a build are read from the disk, too."""
        return self._reuse_builds

    def _assume(self, graph: CudnnGraph) -> bool:
        """Assume that a graph is legal because a similar one is; False if there is none."""
        known = None if self._similar is None or graph.key in self._asked_again else self._similar.of(graph)
        if known is None or not 1 / self._max_factor <= factor(known, graph) <= self._max_factor:
            return False
        verdict = self._memory[known.key]
        if not isinstance(verdict, Legal):
            return False
        self._memory[graph.key] = Legal(tuple(replace(plan, built=False) for plan in verdict.plans))
        self._assumed[graph.key] = known
        return True

    def assumed_from(self, graph: CudnnGraph) -> CudnnGraph | None:
        """Return the similar graph because of which this one is assumed to be legal; None if cuDNN was asked."""
        return self._assumed.get(graph.key)

    def plans(self, graph: CudnnGraph) -> tuple[Plan, ...]:
        """Return the plans that cuDNN offers for a graph that was judged, or for a similar one."""
        verdict = self._memory.get(graph.key)
        return verdict.plans if isinstance(verdict, Legal) else ()

    def ask_again(self, graph: CudnnGraph) -> None:
        """Ask cuDNN about a graph the next time, although it was assumed to be legal."""
        self._asked_again.add(graph.key)
        self._assumed.pop(graph.key, None)
        self._memory.pop(graph.key, None)
        if self._similar is not None:
            self._similar.remove(graph)

    def _learn(self, graphs: Sequence[CudnnGraph]) -> None:
        """Collect the plans compiled for graphs, because they spare other sizes a compilation."""
        for graph in graphs if self._reuse_builds else ():
            if graph.tensor_cores:
                built = {(plan.engine, plan.knobs) for plan in self.plans(graph) if plan.built and not plan.precompiled}
                self._built_plans.add(graph, built)

    def prove(self) -> dict[str, Any]:
        """Ask a worker about the smallest graph that needs a runtime-compiled engine, and return its library versions.

        Raises TargetError when such engines do not work here.
        """
        worker = self._take()
        self._give_back(worker)
        verdict = self._put(PROBE, self._epoch, PlanFilter())
        if not isinstance(verdict, Legal):
            raise TargetError(
                f"cuDNN's runtime-compiled engines do not come up for {self.target.name} ({verdict.code}: "
                f"{verdict.message}), so its answers would be incomplete; see `fusec doctor`"
            )
        self._store.put({self._proof: json.dumps(encode(verdict))})
        return worker.versions

    def start_if_new(self) -> None:
        """Start workers and the proof, if nothing was asked on this machine before with these versions.

        Only half of the workers, because a small model needs no more; none while another process proves, because it
        may compile the same model, and this one then waits for it.
        """
        if not self._store.get([self._proof]):
            if not self.locks.is_claimed(PROBE.key, PROOF):
                self.start(max(1, self.workers // 2))
            self._begin_proof()

    def _begin_proof(self) -> None:
        """Start to prove, in a thread, because it takes as long as a compilation; once per environment.

        A proof that failed, or whose workers were closed, is started again.
        """
        with self._changed:
            last = self._proof_result
            going_on = last is not None and not last.done() and self._proof_epoch == self._epoch
            if going_on or (last is not None and last.done() and last.exception() is None):
                return
            self._proof_result = result = Future[None]()
            self._proof_epoch = epoch = self._epoch
        if self._store.get([self._proof]):
            result.set_result(None)
        else:
            threading.Thread(target=self._prove_once, args=(result, epoch), name="fusec-prove", daemon=True).start()

    def _prove_once(self, result: Future[None], epoch: int) -> None:
        """Prove, unless another process does: then wait for its end, or until the workers of `epoch` are closed."""
        try:
            # a kind of its own, because graphs are claimed while they wait for the proof
            with self.locks.claim(PROBE.key, lambda: self.require_open(epoch), PROOF):
                if not self._store.get([self._proof]):
                    self.prove()
            result.set_result(None)
        except BaseException as error:  # noqa: BLE001  # raised where the proof is required
            result.set_exception(error)

    def _require_proof(self) -> None:
        """Wait for the proof. Raises TargetError when runtime-compiled engines do not work here."""
        if self._proof_result is not None:
            self._proof_result.result()

    def _ask(self, graphs: list[CudnnGraph], arrived: Callable[[CudnnGraph, Verdict], None], end: float) -> None:
        """Ask workers about graphs until `end`, and store their verdicts. arrived: receives each."""
        self.ask_each(graphs, partial(self._put_once, end=end), arrived)

    def _put_once(self, graph: CudnnGraph, epoch: int, end: float) -> Verdict:
        """Ask a worker and store the verdict, unless another process asks the same: then wait for its answer."""
        if time.monotonic() >= end:
            return UNASKED
        try:
            with self.locks.claim(graph.key, lambda: self.require_open(epoch)):
                known = self._stored([graph])
                verdict = known.get(graph) or self._put(graph, epoch)
                self._require_proof()
                if known:
                    self._note({graph: verdict})
                else:
                    self._remember({graph: verdict})
        except EndedError:
            return self._put(graph, epoch)
        return verdict

    def _note(self, verdicts: Mapping[CudnnGraph, Verdict]) -> None:
        """Store verdicts in memory."""
        self._memory |= {graph.key: verdict for graph, verdict in verdicts.items()}
        self._judged |= {graph.number_free_key: graph.key for graph in verdicts}

    def _remember(self, verdicts: Mapping[CudnnGraph, Verdict]) -> None:
        """Store verdicts in memory, and on disk those that last."""
        self._note(verdicts)
        lasting = {g: v for g, v in verdicts.items() if lasts(v)}
        if lasting:
            texts = {self._entry(g.key, listed=is_listed(v)): json.dumps(encode(v)) for g, v in lasting.items()}
            self._store.put(texts)

    def _put(self, graph: CudnnGraph, epoch: int, plan_filter: PlanFilter | None = None) -> Verdict:
        """Ask a worker; if it dies, ask a new one, because an earlier graph may have damaged the first.

        plan_filter: default: that of all questions
        """
        with self._changed:
            self.asked += 1
        plans, engines = self._built_plans.of(graph) if self._reuse_builds else ([], [])
        proven = {"plans": plans, "engines": engines}
        question = {"ask": "verdict", "graph": graph.to_json(), "proven": proven, "hand_over": self._hand_over}
        question["filter"] = (plan_filter or self.plan_filter).to_json()
        died: list[WorkerDeath] = []
        for _ in range(2):
            try:
                answer, _worker = self.exchange(question, epoch=epoch)
            except EndedError as error:
                died.append(WorkerDeath(str(error)))
                break
            if not isinstance(answer, WorkerDeath):
                verdict = decode(answer)
                if "blob" in answer and isinstance(verdict, Legal):
                    plan = next(plan for plan in verdict.plans if plan.built)
                    self.built[graph.key] = (plan, base64.b64decode(answer["blob"]))
                return verdict
            died.append(answer)
            if answer.closed or answer.timeout:  # closed: nobody waits for this verdict
                break
        code = died[-1].signal if all(d.by_own_fault for d in died) else "FUSEC_WORKER_ENDED"
        return Refused("crash", code, died[-1].words)

    def _entry(self, key: str, listed: bool = False) -> str:
        """Return the key of a stored verdict. listed: of one without a build, which only some may read."""
        return f"{self._environment}{'-listed' if listed else ''}:{key}"
