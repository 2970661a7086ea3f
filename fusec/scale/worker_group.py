"""Run one function in several processes, one for each device, that train together."""

from __future__ import annotations

import json
import queue
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusec.errors import ExecutionError, FusecError
from fusec.scale.communicator import mean_of
from fusec.scale.devices import HOST, worker_devices
from fusec.scale.shared_block import SharedBlock
from fusec.system.json_child import Inbox, JsonChild

WORKER = "fusec.scale.group_worker"


def run_workers(
    function: str, devices: str | int | Sequence[str | int] = "all", arguments: Mapping[str, Any] | None = None
) -> list[Any]:
    """Run a function in one process for each device, and return what each returned, in the order of the devices.

    function: `module:name`; it is called with a `Communicator` and the arguments, and returns JSON or None.
    devices: as for `fusec.pool`. Workers on GPUs are connected by NCCL, others by shared memory.
    arguments: keyword arguments, as JSON.
    Raises ExecutionError with the reason if one worker fails or dies; the others are ended.
    """
    chosen = worker_devices(devices)
    on_host = [device.name in HOST for device in chosen]
    if any(on_host) != all(on_host):
        raise FusecError("workers that train together are all on GPUs, or all on the host")
    try:
        given = json.loads(json.dumps(dict(arguments or {})))
    except TypeError as error:
        raise FusecError(f"arguments for workers are numbers, strings, lists and dicts: {error}") from None
    group = _Group([device.name for device in chosen])
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

    def __init__(self, names: Sequence[str]):
        self.names = names
        self.inbox: Inbox = queue.SimpleQueue()
        self.children: list[JsonChild] = []
        self.blocks: list[SharedBlock] = []
        self._results: dict[int, Any] = {}
        self._waiting: dict[int, dict[str, Any]] = {}  # by rank: the collective that it asked for

    def run(self) -> list[Any]:
        """Serve the workers until all have returned."""
        while len(self._results) < len(self.children):
            child, message = self.inbox.get()
            rank = self.children.index(child)
            if message is None:
                if rank not in self._results:
                    raise ExecutionError(f"{self._who(rank)} ended: {child.end()[1]}")
            elif "result" in message:
                self._results[rank] = message["result"]
            elif "failed" in message:
                raise ExecutionError(f"{self._who(rank)}: {message['failed']}")
            elif "group" in message:  # worker 0 names the group of NCCL for all
                for other in self.children:
                    other.tell(message)
            else:
                self._collect(rank, message)
            for waiting, done in zip(self._waiting, self._results, strict=False):
                raise ExecutionError(f"{self._who(waiting)} waits for {self._who(done)}, which has returned already")
        return [self._results[rank] for rank in range(len(self.children))]

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
