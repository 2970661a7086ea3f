"""Run the fuzzer: give chunks to worker processes, and collect their counts and findings in one report.

A worker that dies or hangs is replaced. Its example becomes a finding, which `crash_shrink.py` shrinks.
"""

from __future__ import annotations

import hashlib
import queue
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from fusec.errors import FusecError
from fusec.system.dataclass import dataclass
from fusec.system.json_child import Inbox
from fusec.testing.child_process import Child
from fusec.testing.example_codec import decode
from fusec.testing.failure import Failure
from fusec.testing.finding_folder import Finding, copy
from fusec.testing.runner.coverage import Coverage
from fusec.testing.runner.crash_shrink import CrashShrinker
from fusec.testing.runner.database import Open, State
from fusec.testing.runner.report import Found, FuzzReport, PropertyCount
from fusec.testing.runner.task import Task
from fusec.testing.runner.worker import read_current
from fusec.testing.runner.worker_process import WORKER

CHUNK = 25  # examples of a chunk: few, so that a run stops soon; fixed, so that examples depend on the seed only
TICK_S = 0.25
STOP_S = 35.0  # time for workers to finish shrinking once the run stops
SILENCE_S = 60.0  # time after `hang_s` until a silent worker is killed
LOST_MAX = 5  # workers that may die before they run a property
CRASHES = 2  # crashes of one property that are shrunk
DEATHS = 5  # crashes after which a property is left out, because each costs a process or a timeout


@dataclass(frozen=True)
class WorkPlan:
    """Budget of a run (seconds, examples, findings), the task of its workers, and the folder for findings."""

    task: Task
    seconds: float | None
    examples: int | None
    workers: int
    findings: Path
    max_findings: int


@dataclass
class _Slot:
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
    announced: messages to all workers, for workers that start later.
    crashes: crashes that are being shrunk.
    deaths, shrunk: crashes of each property, and those of them that were shrunk.
    """

    plan: WorkPlan
    state: State
    report: FuzzReport
    scratch: Path
    progress: Callable[[FuzzReport], None]
    inbox: Inbox = field(default_factory=queue.SimpleQueue)
    slots: list[_Slot] = field(default_factory=list[_Slot])
    stopping: bool = False
    stopped_at: float = float("inf")
    handed: int = 0
    lost: int = 0
    replays: deque[Path] = field(default_factory=deque[Path])
    open: dict[str, Open] = field(default_factory=dict[str, Open])
    known: dict[str, Found] = field(default_factory=dict[str, Found])
    announced: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    crashes: list[CrashShrinker] = field(default_factory=list[CrashShrinker])
    deaths: Counter[str] = field(default_factory=Counter[str])
    shrunk: Counter[str] = field(default_factory=Counter[str])
    key: str = ""
    start: float = 0.0

    def run_all(self) -> None:
        """Run until the budget is used and all workers are idle."""
        self.start = time.monotonic()
        self.key = self.plan.task.key
        self.report.examples_before = self.state.examples(self.key)
        self.open = {str(finding.folder): finding for finding in self.state.open_findings()}
        self.replays.extend(f.folder for f in self.open.values() if f.property in self.plan.task.properties)
        count = self.plan.workers
        if self.plan.examples is not None:
            count = min(count, -(-self.plan.examples // CHUNK))
        for number in range(count):
            hash_seed = int.from_bytes(hashlib.sha256(f"{self.plan.task.seed} {number}".encode()).digest()[:4], "big")
            self.slots.append(_Slot(number, hash_seed, self._spawn(number, hash_seed)))
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
        for slot in self.slots:
            slot.child.close()
            if slot.job is not None and "chunk" in slot.job:
                if self.report.interrupted and slot.ran:
                    self.state.finish(self.key, slot.job["chunk"], slot.ran)
                else:
                    self.state.release(self.key, slot.job["chunk"])

    # workers ---------------------------------------------------------------------------------------

    def _spawn(self, number: int, hash_seed: int) -> Child:
        child = Child(WORKER, self.inbox, hash_seed)
        task = replace(
            self.plan.task,
            staging=str(self.scratch / f"staging-{number}"),
            hash_seed=hash_seed,
            current=str(self._current(number)),
        )
        child.tell({"task": task.to_json()})
        for message in self.announced:
            child.tell(message)
        return child

    def _current(self, number: int) -> Path:
        return self.scratch / f"current-{number}.json"

    def _tell_others(self, message: dict[str, Any], but: Child | None = None) -> None:
        self.announced.append(message)
        for slot in self.slots:
            if slot.child is not but:
                slot.child.tell(message)

    def _hand_out(self) -> None:
        for slot in self.slots:
            if slot.job is None and slot.ready and not self.stopping:
                job = self._next_job()
                if job is None:
                    return
                slot.job, slot.ran = job, 0
                slot.child.heard = time.monotonic()
                slot.child.tell(job)

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
        if self.crashes or any(slot.job is not None for slot in self.slots):
            return False
        return self.stopping or (not any(not slot.ready for slot in self.slots) and self._spent())

    def _spent(self) -> bool:
        return not self.replays and self.plan.examples is not None and self.handed >= self.plan.examples

    def _check_time(self) -> None:
        """Stop the run at its limits, and kill workers that are silent for too long."""
        now = time.monotonic()
        over = self.plan.seconds is not None and now - self.start > self.plan.seconds
        if (over or len(self.report.findings) >= self.plan.max_findings) and not self.stopping:
            self.stopping = True
            self.stopped_at = now
            for slot in self.slots:
                slot.child.tell({"stop": True})
            for crash in self.crashes:
                crash.hurried = True
        for slot in self.slots:
            late = now - self.stopped_at > STOP_S
            busy = not slot.gone and (slot.job is not None or not slot.ready)
            if busy and (now - slot.child.heard > self.plan.task.hang_s + SILENCE_S or late):
                self._replace(slot)

    # messages --------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Handle one message of a worker or of a crash shrinker."""
        try:
            child, message = self.inbox.get(timeout=TICK_S)
        except queue.Empty:
            return
        if child is None:
            assert message is not None
            self.crashes = [crash for crash in self.crashes if crash.crash.property != message["property"]]
            self._found(message)
            return
        slot = next((s for s in self.slots if s.child is child and not s.gone), None)
        if slot is None:
            return  # the worker was replaced
        if message is None:
            self._replace(slot)
        elif "ready" in message:
            slot.ready = True
        elif "counts" in message:
            self._count(slot, message["counts"])
        elif "finding" in message:
            self._found(message["finding"], child)
        elif "done" in message:
            self.state.finish(self.key, message["done"], message["examples"])
            slot.job = None
        elif "replayed" in message:
            self._replayed(Path(message["replayed"]), message)
            slot.job = None
        elif "failed" in message:
            raise FusecError(message["failed"])
        elif "defect" in message:
            raise RuntimeError(f"the fuzzer failed in a worker:\n{message['defect']}")

    def _count(self, slot: _Slot, counts: dict[str, Any]) -> None:
        report = self.report
        slot.ran += counts["examples"]
        slot.total += counts["examples"]
        report.examples += counts["examples"]
        report.nodes += counts["nodes"]
        report.shrinking += counts["shrinking"]
        for name, row in counts["properties"].items():
            report.properties.setdefault(name, PropertyCount()).add(row)
        for signature, count in counts["again"].items():
            if signature in self.known:
                self.known[signature].count += count
        report.coverage.merge(Coverage.from_json(counts["coverage"]))

    def _found(self, summary: dict[str, Any], child: Child | None = None) -> None:
        """Store a new finding of the staging folder, or count a known one."""
        made, signature = Path(summary["folder"]), summary["signature"]
        if signature in self.known:
            self.known[signature].count += 1
        else:
            stored = self.state.add(signature, summary["property"], made)
            self._add_to_report(stored, summary, old=False)
            self._tell_others({"know": [summary["property"], summary["kind"], summary["ops"], signature]}, child)
        shutil.rmtree(made, ignore_errors=True)

    def _add_to_report(self, stored: Path, summary: dict[str, Any], old: bool) -> None:
        shown = copy(stored, self.plan.findings)
        names = ("property", "message", "how", "ops", "signature", "doubt")
        found = Found(str(shown), **{name: summary[name] for name in names}, old=old)
        self.known[found.signature] = found
        (self.report.doubts if found.doubt else self.report.findings).append(found)

    def _replayed(self, folder: Path, summary: dict[str, Any]) -> None:
        """Handle the result of an open finding that ran again: it is fixed, or becomes a finding of this run."""
        opened = self.open[str(folder)]
        signature = summary.get("signature") or opened.signature
        if not summary["message"]:
            self.state.drop(opened.signature)
            self.report.fixed.append(folder.name)
        elif signature in self.known:  # two findings that now fail in the same way
            self.known[signature].count += 1
            self.state.drop(opened.signature)
        else:
            self.state.rename(opened.signature, signature)
            data = {"how": "", "ops": {}, "doubt": False, **opened.summary(), **summary, "signature": signature}
            self._add_to_report(folder, data, old=True)
            kind = signature.split(" | ", 2)[2]
            self._tell_others({"know": [opened.property, kind, data["ops"], signature]})

    # crashes ---------------------------------------------------------------------------------------

    def _replace(self, slot: _Slot) -> None:
        """Replace a worker that died or was silent for too long, and make a finding of its example."""
        failure = slot.child.death()
        job, slot.job = slot.job, None
        current = read_current(self._current(slot.number))
        words = slot.child.last_line()
        slot.child.close()
        if current is None or job is None:
            self.lost += 1
            if self.lost > LOST_MAX:
                raise FusecError(f"workers die before they run a property: {failure.message or words}")
        elif "replay" in job:
            self._replayed(Path(job["replay"]), {"message": failure.message, "how": failure.how})
        else:
            unreported = current[1] - slot.total  # examples since the worker's last report
            slot.ran += unreported
            self.report.examples += unreported
            self._crash(current, failure, slot, int(job["chunk"]))
        if job is not None and "chunk" in job:
            self.state.finish(self.key, job["chunk"], slot.ran)
            self.handed -= max(0, job["count"] - slot.ran)
        elif job is not None and current is None:
            self.replays.append(Path(job["replay"]))
        self._current(slot.number).unlink(missing_ok=True)
        slot.gone = self.stopping
        if not self.stopping:
            slot.child, slot.ready, slot.total = self._spawn(slot.number, slot.hash_seed), False, 0

    def _crash(self, current: tuple[int, int, dict[str, Any]], failure: Failure, slot: _Slot, number: int) -> None:
        """Count a crash of a property, and start to shrink it in a thread, because each attempt can cost a process."""
        name = self.plan.task.properties[current[0]]
        self.report.properties.setdefault(name, PropertyCount()).failures += 1
        self.deaths[name] += 1
        if self.deaths[name] == DEATHS:
            self.report.left_out[name] = f"left out after it had ended its process {DEATHS} times"
            self._tell_others({"without": name})
        if self.shrunk[name] >= CRASHES or any(shrinker.crash.property == name for shrinker in self.crashes):
            same = [found for found in self.known.values() if found.property == name and found.how == failure.how]
            for found in same[:1]:
                found.count += 1
            return
        self.shrunk[name] += 1
        graph, case = decode(current[2])
        origin = {"seed": self.plan.task.seed, "chunk": number, "hash_seed": slot.hash_seed}
        shrinker = CrashShrinker(
            Finding(name, graph, case, failure, origin),
            self.plan.task.hang_s,
            self.scratch / f"crashes-{self.shrunk.total()}",
            lambda summary: self.inbox.put((None, summary)),
        )
        shrinker.hurried = self.stopping
        self.crashes.append(shrinker)
