"""A child process that puts graphs to cuDNN: JSON lines in, an answer a line out.

`main(TARGET, device)` is its whole life. If cuDNN kills this process, the parent reads the end of the
stream and takes it for a refusal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

from fusec.errors import FusecError
from fusec.gpu.building import Builder
from fusec.gpu.deviceless import bring_up, check_nvrtc, load_nvrtc
from fusec.gpu.worker import Judge
from fusec.target import load


class Service:
    """Judges a graph, or builds plans of it: what it is asked."""

    def __init__(self, name: str, device: bool):
        target = load(name)
        nvrtc = check_nvrtc(load_nvrtc(), target.sm) if device else bring_up(target.sm)
        self._judge = Judge(target, device)
        self._builder = Builder(target, self._judge.handle)
        self.ready = {"cudnn": self._judge.cudnn.backend_version(), "nvrtc": nvrtc}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        return self._builder.answer(question) if "graph" in question else self._judge.answer(question)


def main(name: str, device: bool) -> int:
    """One JSON object a line: `ready` or `failed` first, then for each question an answer, or `defect`
    with a traceback: what is not cuDNN's word is no verdict."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends the input
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not break the protocol
    try:
        service = Service(name, device)
    except (FusecError, ImportError, OSError, RuntimeError) as error:
        out.write(json.dumps({"failed": str(error)}) + "\n")
        return 2
    out.write(json.dumps({"ready": service.ready}) + "\n")
    for line in sys.stdin:
        try:
            answer = service.answer(json.loads(line))
        except Exception:  # noqa: BLE001  # handed on whole; the parent raises it
            answer = {"defect": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")
    return 0
