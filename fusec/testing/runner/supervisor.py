"""Run the fuzzer: give chunks to worker processes, and collect their counts and findings in one report.

A worker that dies or hangs is replaced. Its example becomes a finding, which `crash_shrink.py` reduces.
"""

from __future__ import annotations

import hashlib
import json
import queue
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusec.errors import FusecError
from fusec.testing.failure import Failure
from fusec.testing.finding_folder import copy
from fusec.testing.resolve import version_of
from fusec.testing.runner.coverage import Coverage
from fusec.testing.runner.crash_shrink import Crash, CrashReducer
from fusec.testing.runner.database import Open, State
from fusec.testing.runner.report import Found, FuzzReport, PropertyCount
from fusec.testing.runner.task import Task
from fusec.testing.runner.worker import read_current
from fusec.testing.runner.worker_process import Child, Inbox

CHUNK = 25  # examples of a chunk: few, so that a run stops soon; fixed, so that examples depend on the seed only
TICK_S = 0.25
STOP_S = 30.0  # time after `shrink_s` for workers to finish shrinking once the run stops
SILENCE_S = 60.0  # time after `hang_s` until a silent worker is killed
LOST_MAX = 5  # workers that may die before they run a property
CRASHES = 2  # crashes of one property that are reduced
DEATHS = 5  # crashes after which a property is left out, because each costs a process or a timeout


@dataclass(frozen=True)
class WorkPlan:
    """Arguments of a fuzzing run, with all defaults filled in."""

    properties: tuple[str, ...]
    seconds: float | None
    examples: int | None
    seed: int
    target: str
    workers: int
    findings: Path
    max_findings: int
    graphs: str
    cases: str
    shrink_s: float
    hang_s: float

    @property
    def key(self) -> str:
        """Return the database key of the run's chunks: a hash of everything that determines their examples."""
        parts = [self.seed, sorted(self.properties), self.target, self.graphs, self.cases]
        return hashlib.sha256(json.dumps([*parts, version_of((self.graphs, self.cases))]).encode()).hexdigest()[:24]


@dataclass
class _Seat:
    """A slot for a worker: its current process and job.

    gone: the process died while the run was stopping, so it was not replaced.
    ran: counted examples of the current chunk.
    total: counted examples of the current process.
    """

    number: int
    hash_seed: int
    child: Child
    ready: bool = False
    gone: bool = False
    job: dict[str, Any] | None = None
    ran: int = 0
    total: int = 0


@dataclass
class Run:
    """A fuzzing run in progress.

    handed: examples given to workers.
    lost: workers that died before they ran a property.
    replays: folders of open findings to run again.
    open: open findings of the database, by folder.
    known: findings of this run, by signature.
    told: messages for workers that start later.
    crashes: crashes that are being reduced.
    deaths, reduced: crashes of each property, and those of them that were reduced.
    """

    plan: WorkPlan
    state: State
    report: FuzzReport
    scratch: Path
    progress: Callable[[FuzzReport], None]
    inbox: Inbox = field(default_factory=queue.SimpleQueue)
    seats: list[_Seat] = field(default_factory=list[_Seat])
    stopping: bool = False
    stopped_at: float = float("inf")
    handed: int = 0
    lost: int = 0
    replays: deque[Path] = field(default_factory=deque[Path])
    open: dict[str, Open] = field(default_factory=dict[str, Open])
    known: dict[str, Found] = field(default_factory=dict[str, Found])
    told: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    crashes: list[CrashReducer] = field(default_factory=list[CrashReducer])
    deaths: Counter[str] = field(default_factory=Counter[str])
    reduced: Counter[str] = field(default_factory=Counter[str])
    key: str = ""
    start: float = 0.0

    def go(self) -> None:
        """Run until the budget is used and all workers are idle."""
        self.start = time.monotonic()
        self.key = self.plan.key
        self.report.examples_before = self.state.examples(self.key)
        self.open = {str(finding.folder): finding for finding in self.state.open_findings()}
        self.replays.extend(f.folder for f in self.open.values() if f.property in self.plan.properties)
        count = self.plan.workers
        if self.plan.examples is not None:
            count = min(count, -(-self.plan.examples // CHUNK))
        for number in range(count):
            hash_seed = int.from_bytes(hashlib.sha256(f"{self.plan.seed} {number}".encode()).digest()[:4], "big")
            self.seats.append(_Seat(number, hash_seed, self._spawn(number, hash_seed)))
        while True:
            self._hand_out()
            if self._idle():
                break
            self._receive()
            self._check_time()
            self.report.seconds = time.monotonic() - self.start
            self.progress(self.report)
        self.report.seconds = time.monotonic() - self.start
        self.progress(self.report)

    def close(self) -> None:
        """End the workers and release their chunks, so that a later run does them."""
        for crash in self.crashes:
            crash.close()
        for seat in self.seats:
            seat.child.close()
            if seat.job is not None and "chunk" in seat.job:
                if self.report.interrupted and seat.ran:
                    self.state.finish(self.key, seat.job["chunk"], seat.ran)
                else:
                    self.state.release(self.key, seat.job["chunk"])

    # workers ---------------------------------------------------------------------------------------

    def _spawn(self, number: int, hash_seed: int) -> Child:
        child = Child(self.inbox, hash_seed)
        task = Task(
            properties=self.plan.properties,
            seed=self.plan.seed,
            target=self.plan.target,
            staging=str(self.scratch / f"staging-{number}"),
            graphs=self.plan.graphs,
            cases=self.plan.cases,
            shrink_s=self.plan.shrink_s,
            hang_s=self.plan.hang_s,
            hash_seed=hash_seed,
            current=str(self._current(number)),
        )
        child.tell({"task": task.to_json()})
        for message in self.told:
            child.tell(message)
        return child

    def _current(self, number: int) -> Path:
        return self.scratch / f"current-{number}.json"

    def _tell_others(self, message: dict[str, Any], but: Child | None = None) -> None:
        self.told.append(message)
        for seat in self.seats:
            if seat.child is not but:
                seat.child.tell(message)

    def _hand_out(self) -> None:
        for seat in self.seats:
            if seat.job is None and seat.ready and not self.stopping:
                job = self._next_job()
                if job is None:
                    return
                seat.job, seat.ran = job, 0
                seat.child.heard = time.monotonic()
                seat.child.tell(job)

    def _next_job(self) -> dict[str, Any] | None:
        if self.replays:
            return {"replay": str(self.replays.popleft())}
        left = None if self.plan.examples is None else self.plan.examples - self.handed
        if left == 0:
            return None
        count = CHUNK if left is None else min(CHUNK, left)
        self.handed += count
        return {"chunk": self.state.claim(self.key), "count": count}

    def _idle(self) -> bool:
        if self.crashes or any(seat.job is not None for seat in self.seats):
            return False
        return self.stopping or (not any(not seat.ready for seat in self.seats) and self._spent())

    def _spent(self) -> bool:
        return not self.replays and self.plan.examples is not None and self.handed >= self.plan.examples

    def _check_time(self) -> None:
        """Stop the run at its limits, and kill workers that are silent for too long."""
        now = time.monotonic()
        over = self.plan.seconds is not None and now - self.start > self.plan.seconds
        if (over or len(self.report.findings) >= self.plan.max_findings) and not self.stopping:
            self.stopping = True
            self.stopped_at = now
            for seat in self.seats:
                seat.child.tell({"stop": True})
            for crash in self.crashes:
                crash.hurried = True
        for seat in self.seats:
            silent = now - seat.child.heard
            late = now - self.stopped_at > STOP_S + self.plan.shrink_s
            busy = not seat.gone and (seat.job is not None or not seat.ready)
            if busy and (silent > self.plan.hang_s + SILENCE_S or late):
                self._replace(seat, silent)

    # messages --------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Handle one message of a worker or of a crash reducer."""
        try:
            child, message = self.inbox.get(timeout=TICK_S)
        except queue.Empty:
            return
        if child is None:
            assert message is not None
            self.crashes = [crash for crash in self.crashes if crash.property != message["property"]]
            self._found(message)
            return
        seat = next((s for s in self.seats if s.child is child and not s.gone), None)
        if seat is None:
            return  # the worker was replaced
        if message is None:
            self._replace(seat)
        elif "ready" in message:
            seat.ready = True
        elif "counts" in message:
            self._count(seat, message["counts"])
        elif "met" in message:
            self._tell_others({"met": message["met"]}, child)
        elif "finding" in message:
            self._found(message["finding"], child)
        elif "done" in message:
            self.state.finish(self.key, message["done"], message["examples"])
            seat.job = None
        elif "replayed" in message:
            self._replayed(Path(message["replayed"]), message)
            seat.job = None
        elif "failed" in message:
            raise FusecError(message["failed"])
        elif "defect" in message:
            raise RuntimeError(f"the fuzzer failed in a worker:\n{message['defect']}")

    def _count(self, seat: _Seat, counts: dict[str, Any]) -> None:
        report = self.report
        seat.ran += counts["examples"]
        seat.total += counts["examples"]
        report.examples += counts["examples"]
        report.nodes += counts["nodes"]
        report.shrinking += counts["shrinking"]
        for name, row in counts["properties"].items():
            report.properties.setdefault(name, PropertyCount()).add(row)
        for signature, count in counts["again"].items():
            if signature in self.known:
                self.known[signature].count += count
        report.coverage.merge(Coverage.from_json(counts["coverage"]))

    def _found(self, told: dict[str, Any], child: Child | None = None) -> None:
        """Store a new finding of the staging folder, or count a known one."""
        made, signature = Path(told["folder"]), told["signature"]
        if signature in self.known:
            self.known[signature].count += 1
        else:
            stored = self.state.add(signature, told["property"], made)
            self._add_to_report(stored, told, old=False)
            self._tell_others({"know": [told["property"], told["kind"], told["ops"], signature]}, child)
        shutil.rmtree(made, ignore_errors=True)

    def _add_to_report(self, stored: Path, told: dict[str, Any], old: bool) -> None:
        shown = copy(stored, self.plan.findings)
        names = ("property", "message", "how", "ops", "signature", "doubt")
        found = Found(str(shown), **{name: told[name] for name in names}, old=old)
        self.known[found.signature] = found
        (self.report.doubts if found.doubt else self.report.findings).append(found)

    def _replayed(self, folder: Path, told: dict[str, Any]) -> None:
        """Handle the result of an open finding that ran again: it is fixed, or becomes a finding of this run."""
        opened = self.open[str(folder)]
        signature = told.get("signature") or opened.signature
        if not told["message"]:
            self.state.drop(opened.signature)
            self.report.fixed.append(folder.name)
        elif signature in self.known:  # two findings that now fail in the same way
            self.known[signature].count += 1
            self.state.drop(opened.signature)
        else:
            self.state.rename(opened.signature, signature)
            data = {"how": "", "ops": {}, "doubt": False, **opened.summary(), **told, "signature": signature}
            self._add_to_report(folder, data, old=True)
            kind = signature.split(" | ", 2)[2]
            self._tell_others({"know": [opened.property, kind, data["ops"], signature]})

    # crashes ---------------------------------------------------------------------------------------

    def _replace(self, seat: _Seat, silent_s: float | None = None) -> None:
        """Replace a worker that died, and make a finding of its example. `silent_s`: kill it, since it was silent."""
        failure = seat.child.death(silent_s)
        job, seat.job = seat.job, None
        current = read_current(self._current(seat.number))
        words = seat.child.last_line()
        seat.child.close()
        if current is None or job is None:
            self.lost += 1
            if self.lost > LOST_MAX:
                raise FusecError(f"workers die before they run a property: {failure.message or words}")
        elif "replay" in job:
            self._replayed(Path(job["replay"]), {"message": failure.message, "how": failure.how})
        else:
            unreported = current[1] - seat.total  # examples since the worker's last report
            seat.ran += unreported
            self.report.examples += unreported
            self._crash(current, failure, seat, int(job["chunk"]))
        if job is not None and "chunk" in job:
            self.state.finish(self.key, job["chunk"], seat.ran)
            self.handed -= max(0, job["count"] - seat.ran)
        elif job is not None and current is None:
            self.replays.append(Path(job["replay"]))
        self._current(seat.number).unlink(missing_ok=True)
        seat.gone = self.stopping
        if not self.stopping:
            seat.child, seat.ready, seat.total = self._spawn(seat.number, seat.hash_seed), False, 0

    def _crash(self, current: tuple[int, int, dict[str, Any]], failure: Failure, seat: _Seat, number: int) -> None:
        """Count a crash of a property, and start to reduce it in a thread, because each attempt can cost a process."""
        name = self.plan.properties[current[0]]
        self.report.properties.setdefault(name, PropertyCount()).failures += 1
        self.deaths[name] += 1
        if self.deaths[name] == DEATHS:
            self.report.left_out[name] = f"left out after it had ended its process {DEATHS} times"
            self._tell_others({"without": name})
        if self.reduced[name] >= CRASHES or any(crash.property == name for crash in self.crashes):
            same = [found for found in self.known.values() if found.property == name and found.how == failure.how]
            for found in same[:1]:
                found.count += 1
            return
        self.reduced[name] += 1
        origin = {"seed": self.plan.seed, "chunk": number, "hash_seed": seat.hash_seed}
        folder = self.scratch / f"crashes-{sum(self.reduced.values())}"
        crash = Crash(name, current[2], failure, origin)
        reducer = CrashReducer(crash, self.plan.hang_s, folder, lambda told: self.inbox.put((None, told)))
        reducer.hurried = self.stopping
        self.crashes.append(reducer)
