"""Run one function in several processes, one for each device, that train together."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fusec.errors import ExecutionError, FusecError
from fusec.scale.communicator import mean_of
from fusec.scale.devices import HOST, worker_devices
from fusec.scale.shared_block import SharedBlock
from fusec.system.json_child import Inbox, JsonChild

WORKER = "fusec.scale.training.group_worker"
JOIN_S = 180.0  # for all workers to join the group of NCCL after worker 0 has named it: seconds, if nothing is wrong


def run_workers(
    function: str,
    devices: str | int | Sequence[str | int] = "all",
    arguments: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
) -> list[Any]:
    """Run a function in one process for each device, and return what each returned, in the order of the devices.

    function: `module:name`; it is called with a `Communicator` and the arguments, and returns JSON or None.
    devices: as for `fusec.pool`. Workers on GPUs are connected by NCCL, others by shared memory.
    arguments: keyword arguments, as JSON.
    timeout_s: seconds until all must have returned; None: no limit.
    Raises ExecutionError with the reason if one worker fails or dies, or waits for one that has returned; the others
    are ended. Also if the time is over; it then says where each worker is.
    """
    chosen = worker_devices(devices)
    on_host = [device.name in HOST for device in chosen]
    if any(on_host) != all(on_host):
        raise FusecError("workers that train together are all on GPUs, or all on the host")
    try:
        given = json.loads(json.dumps(dict(arguments or {})))
    except TypeError as error:
        raise FusecError(f"arguments for workers are numbers, strings, lists and dicts: {error}") from None
    group = _Group([device.name for device in chosen], timeout_s)
    try:
        for rank, device in enumerate(chosen):
            block = SharedBlock()
            child = JsonChild(WORKER, device.environment(len(chosen)), [block.handle], inbox=group.inbox)
            group.blocks.append(block)
            group.children.append(child)
            start = {"rank": rank, "size": len(chosen), "block": block.handle, "on_host": on_host[rank]}
            child.tell({**start, "function": function, "arguments": given})
        return group.run()
    finally:
        group.close()


class _Group:
    """The processes of a group, and the collective that they wait for."""

    def __init__(self, names: Sequence[str], timeout_s: float | None):
        self.names = names
        self.inbox: Inbox = queue.SimpleQueue()
        self.children: list[JsonChild] = []
        self.blocks: list[SharedBlock] = []
        self._timeout_s = timeout_s
        self._start, self._named = time.monotonic(), 0.0
        self._joined: set[int] = set()
        self._results: dict[int, Any] = {}
        self._reports: dict[int, Mapping[str, Any]] = {}  # by rank: calls of its communicator so far, and where it is
        self._waiting: dict[int, dict[str, Any]] = {}  # by rank: the collective that it asked for

    def run(self) -> list[Any]:
        """Serve the workers until all have returned."""
        while len(self._results) < len(self.children):
            child, message = self._next()
            rank = self.children.index(child)
            if message is None:
                raise ExecutionError(f"{self._who(rank)} ended: {child.end()[1]}")
            if "failed" in message:
                raise ExecutionError(f"{self._who(rank)}: {message['failed']}")
            if "collective" in message:
                self._collect(rank, message)
            elif "group" in message:  # worker 0 names the group of NCCL for all
                self._named = time.monotonic()
                for other in self.children:
                    other.tell(message)
            elif "joined" in message:
                self._joined.add(rank)
            else:
                self._reports[rank] = message
            if message and "result" in message:
                self._results[rank] = message["result"]
            self._require_progress()
        return [self._results[rank] for rank in range(len(self.children))]

    def _next(self) -> tuple[Any, dict[str, Any] | None]:
        """Return the next message and its sender. Raises ExecutionError if it is too late."""
        limit: tuple[float, str, Collection[int]] | None = None
        if self._timeout_s is not None:
            limit = self._start + self._timeout_s, "have not returned in time", self._results
        if self._named and len(self._joined) < len(self.children):
            joined = (
                self._named + JOIN_S,
                "have not joined the group; with NCCL_DEBUG=INFO, NCCL tells what it does",
                self._joined,
            )
            limit = joined if limit is None else min(limit, joined, key=lambda one: one[0])
        try:
            return self.inbox.get(timeout=None if limit is None else max(0.0, limit[0] - time.monotonic()))
        except queue.Empty:
            assert limit is not None
            late = [rank for rank in range(len(self.children)) if rank not in limit[2]]
            where = "".join(f"\n{self._who(rank)}: {self._where(rank)}" for rank in late)
            raise ExecutionError(f"workers {limit[1]}:{where}") from None

    def _where(self, rank: int) -> str:
        return self._reports.get(rank, {}).get("at", "no report yet")

    def _require_progress(self) -> None:
        """Raise ExecutionError if a worker waits for one that has returned, and so will wait for ever.

        On the host a worker says what it waits for. On a GPU it waits if it has made more calls than the other one.
        """
        for rank in self._reports.keys() | self._waiting.keys():
            for done in self._results:
                ahead = self._reports.get(rank, {}).get("calls", 0) > self._reports[done]["calls"]
                if rank not in self._results and (rank in self._waiting or ahead):
                    raise ExecutionError(
                        f"{self._who(rank)} waits for {self._who(done)}, which has returned already; it is at "
                        f"{self._where(rank)}"
                    )

    def _who(self, rank: int) -> str:
        return f"worker {rank} on {self.names[rank]}"

    def _collect(self, rank: int, message: dict[str, Any]) -> None:
        """Run a collective once all workers have asked for it."""
        self._waiting[rank] = message
        if len(self._waiting) < len(self.children):
            return
        asked = [self._waiting[r] for r in range(len(self.children))]
        self._waiting.clear()
        if any(one != asked[0] for one in asked):
            raise ExecutionError(f"workers ask for different things at the same time: {asked}")
        arrays = [block.views([asked[0]["record"]])[0] for block in self.blocks]
        result: np.ndarray[Any, Any] = mean_of(arrays) if asked[0]["collective"] == "mean" else arrays[0].copy()
        for array, child in zip(arrays, self.children, strict=True):
            array[...] = result
            child.tell({"done": True})

    def close(self) -> None:
        for child in self.children:
            child.close()
        for block in self.blocks:
            block.close()
