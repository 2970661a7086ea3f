"""Run a function in a child process of a group, with a communicator to the other processes."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import traceback
from typing import Any

from fusec.errors import FusecError
from fusec.ir import Array
from fusec.scale.communicator import Communicator, OnHost
from fusec.scale.shared_block import SharedBlock
from fusec.system.json_child import ParentPipe


class HostCommunicator(OnHost):
    """The communicator of a process on the host: the parent computes in the shared memory of all."""

    def __init__(self, rank: int, size: int, block: SharedBlock, pipe: ParentPipe):
        self.rank, self.size = rank, size
        self._block, self._pipe = block, pipe

    def mean(self, block: Array) -> None:
        self._replaced(block, "mean")

    def broadcast(self, block: Array) -> None:
        self._replaced(block, "broadcast")

    def _replaced(self, block: Array, collective: str) -> None:
        (record,) = self._block.put([block])
        self._pipe.tell({"collective": collective, "record": record})
        _read()
        block[...] = self._block.views([record])[0]


def _read() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(1)  # the parent has closed the group
    return json.loads(line)


def _communicator(start: dict[str, Any], pipe: ParentPipe) -> Communicator:
    rank, size = start["rank"], start["size"]
    if start["on_host"]:
        return HostCommunicator(rank, size, SharedBlock(start["block"]), pipe)
    from fusec.scale.nccl import NcclCommunicator, unique_id  # needs CuPy

    if rank == 0:
        pipe.tell({"group": unique_id()})
    return NcclCommunicator(rank, size, _read()["group"])


def main() -> None:
    """Call the function that the first line names, and send its result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends this process
    pipe = ParentPipe()
    start = _read()
    module, _, name = start["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        pipe.tell({"result": function(_communicator(start, pipe), **start["arguments"])})
    except FusecError as error:
        pipe.tell({"failed": str(error)})
    except Exception:  # noqa: BLE001  # the parent raises it, with this traceback
        pipe.tell({"failed": f"\n{traceback.format_exc()}"})
