"""Hold worker processes that answer questions about cuDNN, several at the same time.

cuDNN runs in workers, because then a graph that kills it does not end this process. Several workers use several cores,
because cuDNN holds Python's lock while it plans. As many work at a time as the machine has cores, in all processes
together, because more would only take memory and slow each other.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, Self, TypeVar

from fusec.errors import TargetError
from fusec.gpu.cudnn.worker_processes.worker_process import EndedError, WorkerDeath, WorkerProcess
from fusec.plans.cache_folder import cache_folder
from fusec.system.machine_locks import MachineLocks
from fusec.targets.target import Target

MAX_WORKERS = 8
RETRY_S = 0.5  # until a thread that waits looks again if other processes still use all cores
SHARE_BYTES = 4 << 30  # of a GPU's memory for each worker, whose CUDA context takes half of it

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerPool:
    """Worker processes for one target, started when they are needed.

    cache: folder of the locks that bound the workers of all processes; default: the cache folder
    workers: the most processes; default: see `most_workers`
    device: ask this machine's GPU instead of the target's description
    """

    def __init__(self, target: Target, cache: Path | None = None, *, workers: int | None = None, device: bool = False):
        self.target, self.device = target, device
        self.workers = workers or most_workers(target if device else None)
        self._all: list[WorkerProcess] = []
        self._new: list[WorkerProcess] = []  # not ready yet
        self._idle: list[WorkerProcess] = []
        self._starting = 0
        self._prestarted = self._waiting = 0  # workers that `start` starts, and threads that wait for a worker
        self._first = 0  # of `_prestarted`, those that do not wait for another one to be ready
        self._epoch = 0  # how often the pool was closed
        self.locks = MachineLocks(cache or cache_folder(), max(self.workers, len(os.sched_getaffinity(0))))
        self._changed = threading.Condition()
        # ends the workers with this object or the interpreter
        self._finalizer = weakref.finalize(self, WorkerProcess.close_all, self._all, self._new)

    def exchange(
        self, question: dict[str, Any], worker: WorkerProcess | None = None, epoch: int | None = None
    ) -> tuple[dict[str, Any] | WorkerDeath, WorkerProcess]:
        """Ask a worker, a given one or any, and return its answer and the worker.

        epoch: when the question was made; default: now

        Raises RuntimeError for a defect of fusec in the worker, EndedError when the pool is closed meanwhile.
        """
        epoch = self._epoch if epoch is None else epoch
        asked = self._take(worker, epoch)
        try:
            with self.locks.slot(lambda: self.require_open(epoch)):
                answer = asked.exchange(question)
        except (RuntimeError, EndedError):
            self._give_back(asked)
            raise
        if isinstance(answer, WorkerDeath):
            return replace(answer, closed=not self._lose(asked)), asked
        self._give_back(asked)
        return answer, asked

    def require_open(self, epoch: int) -> None:
        """Raise EndedError if the pool was closed since an epoch."""
        if epoch != self._epoch:
            raise EndedError

    def ask_each(
        self, items: Sequence[Item], ask: Callable[[Item, int], Result], arrived: Callable[[Item, Result], None]
    ) -> None:
        """Ask about items in threads. An error or Ctrl-C closes the pool, and no more is asked.

        ask: asks about an item, at an epoch
        arrived: receives each answer, in this thread
        """
        threads = ThreadPoolExecutor(max(1, min(self.workers, len(items))), thread_name_prefix="fusec-workers")
        try:
            futures = {threads.submit(ask, item, self._epoch): item for item in items}
            for future in as_completed(futures):
                arrived(futures[future], future.result())
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            self.close()  # so that the threads end that wait for an answer
            raise
        finally:
            threads.shutdown()

    def start(self, count: int | None = None) -> None:
        """Start workers, all by default, without waiting for them, because each takes a second or more.

        Where other processes use all cores, workers start when a thread needs one. On a GPU half of them start when
        one is ready, because the more contexts are created at the same time, the later the first one is ready.
        """
        with self._changed:
            wanted = self.workers if count is None else min(self.workers, count)
            running = len(self._all) + self._starting
            missing = max(0, wanted - running)
            first = min(missing, max(0, ceil(self.workers / 2) - running)) if self.device and not self._all else missing
            self._starting += missing
            self._prestarted += missing
            self._first += first
            epoch = self._epoch
        for number in range(missing):
            each = (epoch, number < first)
            threading.Thread(target=self._prestart, args=each, name="fusec-worker-start", daemon=True).start()

    def _prestart(self, epoch: int, is_first: bool) -> None:
        """Start a worker; one that is not of the first waits until one of these is ready, or all have failed."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: is_first or self._all or not self._first or epoch != self._epoch)
            with contextlib.suppress(TargetError):  # a thread that needs a worker starts another, and raises the error
                self._give_back(self._started(epoch, self.locks.free_slot()))
        finally:
            with self._changed:
                self._prestarted -= 1
                self._first -= is_first
                self._changed.notify_all()

    def _started(self, epoch: int, slot: AbstractContextManager[object]) -> WorkerProcess:
        """Start a worker and wait until it is ready. It counts in `_starting`, and `close` ends it, too.

        slot: one of the machine's, which is held meanwhile; raises TargetError if there is none.
        """
        worker: WorkerProcess | None = None
        try:
            with slot as is_free:
                if not is_free:
                    raise TargetError("other processes use all cores")
                with self._changed:
                    if epoch != self._epoch:
                        raise EndedError
                    worker = WorkerProcess(self.target, self.device)
                    self._new.append(worker)
                worker.wait_ready()
        finally:
            with self._changed:
                self._starting -= 1
                is_open = worker in self._new
                if worker is not None and is_open:
                    self._new.remove(worker)
                    if worker.versions:
                        self._all.append(worker)
                self._changed.notify_all()
        if not is_open:
            raise EndedError
        return worker

    def _take(self, wanted: WorkerProcess | None = None, epoch: int | None = None) -> WorkerProcess:
        """Take the worker wanted, when it is idle; else any idle one, or a new one while fewer than the limit run.

        Where other processes use all cores, threads wait for the workers that there are.

        Raises EndedError if the pool is closed meanwhile, or was closed since the epoch.
        """
        with self._changed:
            epoch = self._epoch if epoch is None else epoch
            while True:
                retry_s: float | None = None
                if epoch != self._epoch:
                    raise EndedError
                if wanted is not None and wanted in self._all:
                    if wanted in self._idle:
                        self._idle.remove(wanted)
                        return wanted
                elif self._idle:
                    return self._idle.pop(0)
                elif self._prestarted <= self._waiting and len(self._all) + self._starting < self.workers:
                    if slot := self._slot_to_start(epoch):
                        self._starting += 1
                        break
                    retry_s = RETRY_S
                self._waiting += 1
                self._changed.wait(retry_s)
                self._waiting -= 1
        return self._started(epoch, slot)

    def _slot_to_start(self, epoch: int) -> AbstractContextManager[object] | None:
        """Return a slot to start a worker with; None if this pool has workers, and other processes use all cores.

        The first worker of a pool waits for a slot when it starts.
        """
        if not self._all and not self._starting:
            return self.locks.slot(lambda: self.require_open(epoch))
        slot = ExitStack()
        return slot if slot.enter_context(self.locks.free_slot()) else None

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._changed:
            if worker in self._all:
                self._idle.append(worker)
            self._changed.notify_all()

    def _lose(self, worker: WorkerProcess) -> bool:
        """Remove a worker that died; False if `close` ended it."""
        with self._changed:
            is_open = worker in self._all
            if is_open:
                self._all.remove(worker)
            self._changed.notify_all()
        worker.close()
        return is_open

    def close(self) -> None:
        """End the workers. The pool may be asked again, and starts new ones."""
        with self._changed:
            self._epoch += 1
            self._idle.clear()
            ended = [*self._all, *self._new]
            self._all.clear()
            self._new.clear()
            self._changed.notify_all()
        WorkerProcess.close_all(ended)  # without the lock, because a thread that loses its worker takes it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def most_workers(here: Target | None) -> int:
    """Return the most worker processes: `FUSEC_WORKERS`, else one per core, at most 8, and on a GPU as memory allows.

    here: this machine's GPU, if the workers use it

    Raises TargetError if `FUSEC_WORKERS` is not a number of 1 or more.
    """
    given = os.environ.get("FUSEC_WORKERS", "")
    if not given:
        cores = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        return cores if here is None else max(1, min(cores, here.memory_bytes // SHARE_BYTES))
    if not given.isdecimal() or int(given) < 1:
        raise TargetError(f"FUSEC_WORKERS is a number of processes, 1 or more, not {given!r}")
    return int(given)
