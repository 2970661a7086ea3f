"""Run a function in a child process of a group, with a communicator to the other processes."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

from fusec.errors import FusecError
from fusec.ir import Array
from fusec.scale.communicator import Counted, OnHost
from fusec.scale.shared_block import SharedBlock
from fusec.system.json_child import ParentPipe

REPORT_S = 1.0
FRAMES = 3  # of the stack that a report shows


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
        self.calls += 1
        (record,) = self._block.put([block])
        self._pipe.tell({"collective": collective, "record": record})
        _read()
        block[...] = self._block.views([record])[0]


def _read() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(1)  # the parent has closed the group
    return json.loads(line)


def _communicator(start: dict[str, Any], pipe: ParentPipe) -> Counted:
    rank, size = start["rank"], start["size"]
    if start["on_host"]:
        return HostCommunicator(rank, size, SharedBlock(start["block"]), pipe)
    from fusec.scale.nccl import NcclCommunicator, unique_id  # needs CuPy

    if rank == 0:
        pipe.tell({"group": unique_id()})
    made = NcclCommunicator(rank, size, _read()["group"])
    pipe.tell({"joined": True})
    return made


def _report(communicator: Counted, pipe: ParentPipe) -> None:
    """Tell the parent where this worker is, so that it sees who waits for ever."""
    while True:
        time.sleep(REPORT_S)
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  # documented, for debuggers
        frame = frames.get(threading.main_thread().ident or 0)
        pipe.tell({"calls": communicator.calls, "at": _place(frame)})


def _place(frame: FrameType | None) -> str:
    """Return the innermost functions of a stack, with their lines."""
    names: list[str] = []
    while frame is not None and len(names) < FRAMES:
        code = frame.f_code
        names.append(f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})")
        frame = frame.f_back
    return ", called by ".join(names)


def main() -> None:
    """Call the function that the first line names, and send its result.

    The process then waits for its end, because on GPUs others may still read its memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends this process
    pipe = ParentPipe()
    start = _read()
    module, _, name = start["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        communicator = _communicator(start, pipe)
        threading.Thread(target=_report, args=(communicator, pipe), daemon=True).start()
        result = function(communicator, **start["arguments"])
        pipe.tell({"result": result, "calls": communicator.calls})
        _read()
    except FusecError as error:
        pipe.tell({"failed": str(error)})
    except Exception:  # noqa: BLE001  # the parent raises it, with this traceback
        pipe.tell({"failed": f"\n{traceback.format_exc()}"})
