"""Run a worker process that asks cuDNN: one JSON question a line in, one JSON answer a line out.

If cuDNN kills the process, the parent reads the end of the stream.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from fusec.errors import FusecError
from fusec.gpu.cudnn.without_driver.deviceless import INSTALL, bring_up, check_nvrtc, load_cudnn, load_nvrtc
from fusec.gpu.device import woken
from fusec.system.json_child import ParentPipe
from fusec.targets.target import Target, load

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def main() -> None:
    """Answer questions until the input ends.

    The first line in names the `target` to answer for, and whether to ask this machine's GPU (`device`). Each line out
    is one JSON object: first `ready` with the library versions, or `failed`. Then comes an answer to each question, or
    `defect` with a traceback for an error of fusec.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends the input
    pipe = ParentPipe()
    first = json.loads(sys.stdin.readline())
    target, device = load(first["target"]), first["device"]
    try:
        with woken(target.name) if device else nullcontext():  # libraries and modules load while the context is created
            nvrtc = check_nvrtc(load_nvrtc(), target.sm) if device else bring_up(target.sm)
            load_cudnn()
            version, answers = _answers(target, device)
    except ModuleNotFoundError as error:
        pipe.tell({"failed": f"{error}: {INSTALL}; or take --target cpu"})
        return
    except (FusecError, ImportError, OSError, RuntimeError) as error:
        pipe.tell({"failed": str(error)})
        return
    pipe.tell({"ready": {"cudnn": version, "nvrtc": nvrtc}})
    for line in sys.stdin:
        try:
            question = json.loads(line)
            answer = answers[question["ask"]](question)
        except Exception:  # noqa: BLE001  # the parent raises it, with this traceback
            answer = {"defect": traceback.format_exc()}
        pipe.tell(answer)


def _answers(target: Target, device: bool) -> tuple[int, dict[str, Answer]]:
    """Return cuDNN's version, and the function that answers each kind of question."""
    import cudnn  # these imports need the driver and NVRTC loaded

    from fusec.gpu.cudnn.handles import create_handle
    from fusec.gpu.cudnn.legality.graph_check import GraphCheck
    from fusec.gpu.cudnn.plans.plan_builder import PlanBuilder

    handle: Any = create_handle() if device else None
    check, builder = GraphCheck(target, handle), PlanBuilder(target, handle)
    answers: dict[str, Answer] = {
        "verdict": check.verdict,
        "plan": builder.plan,
        "plans": builder.plans,
    }
    return cudnn.backend_version(), answers
