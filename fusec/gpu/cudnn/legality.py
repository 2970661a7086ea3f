"""Ask the real cuDNN in worker processes if graphs are legal for a target, and store the verdicts.

cuDNN runs in workers, because then a graph that kills it is a refusal, not the end of this process. Several workers use
several cores, because cuDNN holds Python's lock while it plans.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusec.errors import TargetError
from fusec.gpu.cudnn.deviceless import cudnn_version, nvrtc_libraries
from fusec.gpu.cudnn.engine_ids import Identity
from fusec.gpu.cudnn.legality_worker import decode, encode
from fusec.gpu.cudnn.similar_graphs import SimilarGraphs, factor
from fusec.gpu.cudnn.worker_process import EndedError, WorkerDeath, WorkerProcess
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.known_bugs import deadly, misread
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import Legal, Plan, Refused, Verdict
from fusec.targets.target import Target

SCHEMA = 12  # of stored verdicts: raise it when their meaning changes
MAX_WORKERS = 8
SHARE_BYTES = 4 << 30  # of a GPU's memory for each process that has a context there, which takes half of one
WRITE_S = 0.2  # verdicts that arrive within this time are stored together
# Codes that describe the state of the machine, not the graph.
PASSING = ("CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED")

# The smallest graph that only a runtime-compiled engine runs. If it is refused, those engines do not work on this
# machine, and verdicts would be wrong.
PROBE = CudnnGraph(
    (CudnnTensor(1, (1, 8, 64), (512, 64, 1), DType.F16), CudnnTensor(2, (1, 8, 64), (512, 64, 1), DType.F16)),
    (CudnnCall("pointwise", (1,), (2,), "relu"),),
)


class Oracle:
    """Worker processes that judge graphs for one target.

    Verdicts are stored in memory and in `store`, by graph, target and the versions of cuDNN, its frontend and NVRTC.

    workers: the most processes; default: see `most_workers`
    device: ask this machine's GPU instead of the target's description
    kin: a graph is also legal if cuDNN offers a plan that was built for it in other sizes. That takes milliseconds
        instead of a compilation. Such verdicts stay in memory.
    hand_over: `built` holds cuDNN's first plan of each graph that was asked about, with its serialized form
    sizes: a graph is also legal, without asking, if a legal one differs in size by at most this factor. Such verdicts
        stay in memory, and `doubt` takes one back.

    Raises TargetError when a part is missing that correct verdicts need.
    """

    def __init__(
        self,
        target: Target,
        *,
        store: Store | None = None,
        workers: int | None = None,
        device: bool = False,
        kin: bool = False,
        hand_over: bool = False,
        sizes: float = 0.0,
    ):
        self.target = target
        self.device = device
        self.asked = 0  # graphs that cuDNN was asked about
        self._kin = kin
        self._hand_over = hand_over
        self.built: dict[str, tuple[Plan, bytes]] = {}  # by key of the graph
        self._built: dict[Hashable, set[Identity]] = {}  # plans, by `CudnnGraph.kin`, which similar graphs share
        self._store = store if store is not None else Store()
        self._limit = workers or most_workers(target if device else None)
        self._memory: dict[str, Verdict] = {}
        self._environment = _environment(target, device)
        self._lock = threading.Lock()
        self._proven = False
        self._similar = SimilarGraphs() if sizes else None
        self._max_factor = sizes
        self._assumed: dict[str, CudnnGraph] = {}  # by key of a graph assumed to be legal: the similar one
        self._asked_again: set[str] = set()
        self._all: list[WorkerProcess] = []
        self._new: list[WorkerProcess] = []  # not up yet
        self._idle: list[WorkerProcess] = []
        self._starting = 0
        self._coming = self._waiting = 0  # workers that start unasked, and threads that wait for one
        self._ended = 0  # how often
        self._turn = threading.Condition(self._lock)
        # ends the workers with this object or the interpreter
        self._finalizer = weakref.finalize(self, WorkerProcess.close_all, self._all, self._new)

    def judge(self, graphs: Sequence[CudnnGraph], progress: Callable[[int, int], None] | None = None) -> list[Verdict]:
        """Return one verdict per graph, in order; equal graphs are asked once. `progress` is told (done, to ask)."""
        new = {g.key: g for g in graphs if g.key not in self._memory}
        for key, graph in list(new.items()):
            hazard = deadly(graph) or misread(graph)
            if hazard:
                self._memory[key] = Refused("validate", "FUSEC_HAZARD", hazard)
                del new[key]
        if new:
            for key, text in self._store.get(map(self._entry, new)).items():
                graph_key = key.partition(":")[2]
                self._memory[graph_key] = decode(json.loads(text))
                del new[graph_key]
        for key, graph in list(new.items()):
            if self._assume(graph):
                del new[key]
        if new:
            self.start(len(new))
            self._prove_once()
            before = 0
            for some in self._rounds(list(new.values())):
                if self._kin:  # from verdicts stored on disk, and from the round before
                    for graph in graphs:
                        self._learn(graph)
                self._ask(some, progress, before, len(new))
                before += len(some)
        for graph in graphs:
            if self._kin:
                self._learn(graph)
            asked = graph.key not in self._assumed
            if self._similar is not None and asked and isinstance(self._memory[graph.key], Legal):
                self._similar.add(graph)
        return [self._memory[g.key] for g in graphs]

    def _rounds(self, graphs: list[CudnnGraph]) -> list[list[CudnnGraph]]:
        """Graphs that differ in size alone come after the first of them, because its plans spare them a compilation."""
        if not self._kin:
            return [graphs]
        firsts = {graph.kin: graph.key for graph in reversed(graphs)}
        rounds: tuple[list[CudnnGraph], list[CudnnGraph]] = ([], [])
        for graph in graphs:
            rounds[firsts[graph.kin] != graph.key].append(graph)
        return [some for some in rounds if some]

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

    def relative(self, graph: CudnnGraph) -> CudnnGraph | None:
        """Return the similar graph because of which this one is assumed to be legal; None if cuDNN was asked."""
        return self._assumed.get(graph.key)

    def plans(self, graph: CudnnGraph) -> tuple[Plan, ...]:
        """Return the plans that cuDNN offers for a graph that was judged, or for a similar one."""
        verdict = self._memory.get(graph.key)
        return verdict.plans if isinstance(verdict, Legal) else ()

    def doubt(self, graph: CudnnGraph) -> None:
        """Ask cuDNN about a graph the next time, although it was assumed to be legal."""
        self._asked_again.add(graph.key)
        self._assumed.pop(graph.key, None)
        self._memory.pop(graph.key, None)
        if self._similar is not None:
            self._similar.remove(graph)

    def _learn(self, graph: CudnnGraph) -> None:
        verdict = self._memory.get(graph.key)
        if isinstance(verdict, Legal) and graph.tensor_cores:
            built = {(plan.engine, plan.knobs) for plan in verdict.plans if plan.built and not plan.precompiled}
            if built:
                self._built.setdefault(graph.kin, set()).update(built)

    def prove(self) -> dict[str, Any]:
        """Ask a worker about the smallest graph that needs a runtime-compiled engine, and return its library versions.

        Raises TargetError when such engines do not work here.
        """
        worker = self._take()
        self._give_back(worker)
        verdict = self._put(PROBE)
        if not isinstance(verdict, Legal):
            raise TargetError(
                f"cuDNN's runtime-compiled engines do not come up for {self.target.name} ({verdict.code}: "
                f"{verdict.message}), so its answers would be incomplete; see `fusec doctor`"
            )
        self._remember({PROBE: verdict})
        return worker.versions

    def _prove_once(self) -> None:
        """Call `prove` once per environment."""
        if not self._proven and not self._store.get([self._entry(PROBE.key)]):
            self.prove()
        self._proven = True

    def _ask(
        self, graphs: list[CudnnGraph], progress: Callable[[int, int], None] | None, before: int, count: int
    ) -> None:
        """Put graphs to workers. before: how many of `count` were asked about in earlier rounds."""
        pool = ThreadPoolExecutor(min(self._limit, len(graphs)), thread_name_prefix="fusec-oracle")
        came, since = dict[CudnnGraph, Verdict](), time.monotonic()
        try:
            futures = {pool.submit(self._put, graph, self._ended): graph for graph in graphs}
            left = set(futures)
            while left:
                done, left = wait(left, return_when=FIRST_COMPLETED)
                came |= {futures[future]: future.result() for future in done}
                if time.monotonic() - since > WRITE_S:
                    self._remember(came)
                    came, since = {}, time.monotonic()
                if progress is not None:
                    progress(before + len(graphs) - len(left), count)
        except BaseException:
            # an error or Ctrl-C: questions in progress end with their worker, the others are not asked
            pool.shutdown(wait=False, cancel_futures=True)
            self.close()
            raise
        finally:
            self._remember(came)
            pool.shutdown()

    def _remember(self, verdicts: Mapping[CudnnGraph, Verdict]) -> None:
        """Store verdicts in memory, and on disk those that depend on the graph alone."""
        self._memory |= {graph.key: verdict for graph, verdict in verdicts.items()}
        lasting = {g: v for g, v in verdicts.items() if _lasts(v)}
        if lasting:
            self._store.put({self._entry(g.key): json.dumps(encode(v)) for g, v in lasting.items()})

    def _put(self, graph: CudnnGraph, ended: int | None = None) -> Verdict:
        """Ask a worker; if it dies, ask a new one, because an earlier graph may have damaged the first.

        ended: how often the oracle had been closed when the question was made; default: now
        """
        with self._lock:
            self.asked += 1
            ended = self._ended if ended is None else ended
        died: list[WorkerDeath] = []
        for _ in range(2):
            try:
                worker = self._take(ended=ended)
            except EndedError as error:
                died.append(WorkerDeath(str(error)))
                break
            proven = self._built.get(graph.kin, ()) if self._kin else ()
            try:
                answer = worker.ask(graph, proven, self._hand_over)
            except RuntimeError:  # a defect of fusec, not of the worker
                self._give_back(worker)
                raise
            if not isinstance(answer, WorkerDeath):
                if worker.blob and isinstance(answer, Legal):
                    self.built[graph.key] = (answer.plans[0], worker.blob)
                self._give_back(worker)
                return answer
            died.append(answer)
            if not self._lose(worker):  # the oracle ended it: nobody waits for this verdict
                break
            if answer.timeout:
                break
        code = died[-1].signal if all(d.by_own_fault for d in died) else "FUSEC_WORKER_ENDED"
        return Refused("crash", code, died[-1].words)

    def exchange(
        self, question: dict[str, Any], worker: WorkerProcess | None = None
    ) -> tuple[dict[str, Any] | WorkerDeath, WorkerProcess]:
        """Ask a worker, a given one or any, and return its answer and the worker.

        Raises RuntimeError for a defect of fusec in the worker, EndedError when the oracle is closed meanwhile.
        """
        asked = self._take(worker)
        answer = asked.exchange(question)
        if isinstance(answer, WorkerDeath):
            self._lose(asked)
            return answer, asked
        self._give_back(asked)
        if "defect" in answer:
            raise RuntimeError(f"fusec failed to answer in a worker:\n{answer['defect']}")
        return answer, asked

    @property
    def workers(self) -> int:
        """Return the most workers that may run."""
        return self._limit

    def start(self, count: int | None = None) -> None:
        """Start workers, all by default, without waiting for them, because each takes a second or more."""
        with self._turn:
            wanted = self._limit if count is None else min(self._limit, count)
            missing = max(0, wanted - len(self._all) - self._starting)
            self._starting += missing
            self._coming += missing
            ended = self._ended
        for _ in range(missing):
            threading.Thread(target=self._come_up, args=(ended,), name="fusec-oracle-start", daemon=True).start()

    def _come_up(self, ended: int) -> None:
        try:
            with contextlib.suppress(TargetError):  # who waits for a worker starts another, and gets the error
                self._give_back(self._started(ended))
        finally:
            with self._turn:
                self._coming -= 1
                self._turn.notify_all()

    def _started(self, ended: int) -> WorkerProcess:
        """Start a worker and wait until it is up; it counts in `_starting`, and `close` ends it, too."""
        worker: WorkerProcess | None = None
        try:
            with self._turn:
                if ended != self._ended:
                    raise EndedError
                worker = WorkerProcess(self.target, self.device)
                self._new.append(worker)
            worker.wait_ready()
        finally:
            with self._turn:
                self._starting -= 1
                there = worker in self._new
                if worker is not None and there:
                    self._new.remove(worker)
                    if worker.versions:
                        self._all.append(worker)
                self._turn.notify_all()
        if not there:
            raise EndedError
        return worker

    def _take(self, wanted: WorkerProcess | None = None, ended: int | None = None) -> WorkerProcess:
        """Take the worker wanted, when it is idle; else any idle one, or a new one while fewer than the limit run.

        Raises EndedError when the oracle is closed meanwhile, or was closed since it had been `ended` times.
        """
        with self._turn:
            ended = self._ended if ended is None else ended
            while True:
                if ended != self._ended:
                    raise EndedError
                if wanted is not None and wanted in self._all:
                    if wanted in self._idle:
                        self._idle.remove(wanted)
                        return wanted
                elif self._idle:
                    return self._idle.pop(0)
                elif self._coming <= self._waiting and len(self._all) + self._starting < self._limit:
                    self._starting += 1
                    break
                self._waiting += 1
                self._turn.wait()
                self._waiting -= 1
        return self._started(ended)

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._turn:
            if worker in self._all:
                self._idle.append(worker)
            self._turn.notify_all()

    def _lose(self, worker: WorkerProcess) -> bool:
        """Remove a worker that died; False if the oracle ended it."""
        with self._turn:
            there = worker in self._all
            if there:
                self._all.remove(worker)
            self._turn.notify_all()
        worker.close()
        return there

    def _entry(self, key: str) -> str:
        return f"{self._environment}:{key}"

    def close(self) -> None:
        """End the workers; the oracle may be asked again and starts new ones."""
        with self._turn:
            self._ended += 1
            self._idle.clear()
            ended = [*self._all, *self._new]
            self._all.clear()
            self._new.clear()
            self._turn.notify_all()
        WorkerProcess.close_all(ended)  # without the lock, because a thread that loses its worker takes it

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def most_workers(here: Target | None = None) -> int:
    """Return the most worker processes: `FUSEC_WORKERS`, else one per core, at most 8, and on a GPU as memory allows.

    Raises TargetError when `FUSEC_WORKERS` is not a number of 1 or more.
    """
    given = os.environ.get("FUSEC_WORKERS", "")
    if not given:
        cores = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        return cores if here is None else max(1, min(cores, here.memory_bytes // SHARE_BYTES))
    if not given.isdecimal() or int(given) < 1:
        raise TargetError(f"FUSEC_WORKERS is a number of processes, 1 or more, not {given!r}")
    return int(given)


def _lasts(verdict: Verdict) -> bool:
    """Return True if a verdict depends on the graph alone, and holds the next time."""
    if isinstance(verdict, Legal):
        return any(plan.built for plan in verdict.plans)
    return verdict.code not in PASSING and not verdict.code.startswith("FUSEC_")


def _environment(target: Target, device: bool) -> str:
    """Return a digest of what a verdict depends on besides the graph; no wheel is loaded for it."""
    versions = [_version("nvidia-cudnn-frontend"), cudnn_version(), *_nvrtc_versions()]
    text = json.dumps([SCHEMA, target.digest, device, versions])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nvrtc_versions() -> list[str]:
    """Return the file names of NVRTC's libraries; the name of the builtins holds major and minor version."""
    return [Path(library).name for library in nvrtc_libraries()]
