"""Answer questions about cuDNN in a worker process: one JSON question a line in, one JSON answer a line out.

`main(TARGET, device)` runs the worker. If cuDNN kills it, the parent reads the end of the stream, which is a refusal.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Any

from fusec.errors import FusecError, LoweringError
from fusec.gpu.cudnn.deviceless import INSTALL, bring_up, check_nvrtc, load_nvrtc
from fusec.gpu.cudnn.engine_ids import PYTHON_ENGINES, Identity, knobs_of
from fusec.gpu.cudnn.error_messages import reason_of
from fusec.gpu.cudnn.plan_worker import PlanBuilder
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.known_bugs import wrong_plan
from fusec.plans.verdict import Legal, Plan, Refused, Verdict
from fusec.targets.target import Target, load


class LegalityJudge:
    """Judge of graphs that asks cuDNN: without a device for a target, or on this machine's GPU."""

    def __init__(self, target: Target, device: bool):
        import cudnn  # only after the driver and NVRTC are loaded

        self.cudnn = cudnn
        self.target = target
        self.handle: Any = cudnn.create_handle() if device else None
        self.hands_over = False
        self.blob = b""  # cuDNN's first plan of the last graph, serialized, if it was built and `hands_over` is set

    def judge(self, graph: CudnnGraph, proven: Collection[Identity] = ()) -> Verdict:
        """Judge a graph: legal with the plans offered, if one of them builds; else refused, with stage and reason.

        proven: plans that were built for this graph in other sizes; if one of them is offered, none is compiled
        """
        from fusec.gpu.cudnn.emit import emit

        cudnn, self.blob = self.cudnn, b""
        declined = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)
        stage = "lower"
        try:
            g = emit(graph, handle=self.handle, target=None if self.handle else self.target)
            stage = "validate"
            g.validate()
            stage = "build_operation_graph"
            g.build_operation_graph()
            stage = "plan"
            g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except LoweringError as error:
            return Refused(stage, "FUSEC", str(error))
        except declined as error:
            return Refused(stage, *reason_of(error))
        return self._plans(g, graph, proven)

    def _plans(self, g: Any, graph: CudnnGraph, proven: Collection[Identity]) -> Verdict:
        cudnn = self.cudnn
        note = cudnn.behavior_note.RUNTIME_COMPILATION
        offered = range(g.get_execution_plan_count())
        identity = {i: (int(engine), knobs) for i in offered for engine, knobs in [g.get_engine_and_knobs_at_index(i)]}
        pairs = {i: tuple(sorted(knobs_of(knobs).items())) for i, (_, knobs) in identity.items()}
        indices = [i for i in offered if 0 <= identity[i][0] < PYTHON_ENGINES]
        wrong = {i: reason for i in indices if (reason := wrong_plan(graph, identity[i][0], knobs_of(identity[i][1])))}
        if indices and len(wrong) == len(indices):
            return Refused("plan", "KNOWN_WRONG", next(iter(wrong.values())))
        indices = [i for i in indices if i not in wrong]
        runtime = {i: note in g.get_behavior_notes_for_plan_at_index(i) for i in indices}
        if not graph.tensor_cores:
            # takes effect when a plan is built, not in the count: a plan counts only once it was built
            g.deselect_numeric_notes([cudnn.numerical_note.TENSOR_CORE])
        elif all(runtime.values()) and any((identity[i][0], pairs[i]) in proven for i in indices):
            return Legal(tuple(Plan(identity[i][0], pairs[i], precompiled=False) for i in indices))
        built: dict[int, int] = {}  # place in the list -> workspace
        failed: set[int] = set()
        failure: BaseException | None = None
        for index in sorted(indices, key=lambda i: runtime[i]):
            if built and (graph.tensor_cores or runtime[index]):
                break  # one built plan proves the rest of an unrestricted list; compiling costs up to a second each
            try:
                g.build_plan_at_index(index)
                built[index] = int(g.get_workspace_size_plan_at_index(index))
            except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
                failed.add(index)
                failure = failure or error
        if not built:
            if failure is None:
                return Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "cuDNN offers no plan")
            code, message = reason_of(failure)
            if message.startswith("Deselecting"):
                code, message = "CUDNN_STATUS_NOT_SUPPORTED", "every plan uses tensor cores, which fp32 excludes (tf32)"
            return Refused("build", code, message)
        if self.hands_over and list(built) == indices[:1]:
            self.blob = self._serialized(g, indices[0])
        plans: list[Plan] = []
        for index in indices:
            if index in built or (graph.tensor_cores and index not in failed):
                engine, _ = identity[index]
                plans.append(Plan(engine, pairs[index], not runtime[index], built.get(index, 0), index in built))
        return Legal(tuple(plans))

    def _serialized(self, g: Any, index: int) -> bytes:
        """Serialize a plan that was built; empty if cuDNN cannot."""
        try:
            g.build_plan_at_index(index)  # selects the plan, which is built already
            return bytes(g.serialize())
        except (self.cudnn.cudnnGraphNotSupportedError, RuntimeError):
            return b""


def encode(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON data."""
    if isinstance(verdict, Refused):
        return {"refused": [verdict.stage, verdict.code, verdict.message]}
    return {
        "legal": [
            [p.engine, [list(k) for k in p.knobs], p.precompiled, p.workspace_bytes, p.built] for p in verdict.plans
        ]
    }


def decode(data: dict[str, Any]) -> Verdict:
    """Read a verdict from JSON data. Raises ValueError for other data, as in a damaged file."""
    if "refused" in data:
        stage, code, message = data["refused"]
        if not all(isinstance(text, str) for text in (stage, code, message)):
            raise ValueError(f"no refusal: {data['refused']!r}")
        return Refused(stage, code, message)
    return Legal(tuple(_plan(*plan) for plan in data["legal"]))


def _plan(engine: Any, knobs: Any, precompiled: Any, workspace_bytes: Any = 0, built: Any = False) -> Plan:
    """Read a plan of a verdict. Raises ValueError for values of other types."""
    pairs = tuple((k, v) for k, v in knobs)
    whole = [engine, workspace_bytes, *(number for pair in pairs for number in pair)]
    if any(type(number) is not int for number in whole) or any(type(flag) is not bool for flag in (precompiled, built)):
        raise ValueError(f"no plan: engine {engine!r} with the knobs {knobs!r}")
    return Plan(engine, pairs, precompiled, workspace_bytes, built)


def main(name: str, device: bool) -> int:
    """Judge graphs, build plans and compile kernels until the input ends: see `serve`."""

    def begin(target: Target) -> tuple[Any, Answer]:
        judge = LegalityJudge(target, device)
        builder = PlanBuilder(judge.cudnn, judge.handle, target)

        def respond(question: dict[str, Any]) -> dict[str, Any]:
            if "all_sizes" in question:
                return builder.answer(question)
            if "kernel" in question:
                return _compiled(question)
            proven = {(engine, tuple((k, v) for k, v in knobs)) for engine, knobs in question.get("proven", ())}
            judge.hands_over = bool(question.get("hand_over"))
            answer = encode(judge.judge(CudnnGraph.from_json(question), proven))
            return {**answer, "blob": base64.b64encode(judge.blob).decode()} if judge.blob else answer

        return judge.cudnn, respond

    return serve(name, device, begin)


def _compiled(question: dict[str, Any]) -> dict[str, Any]:
    """Compile a kernel with CuPy, which stores it on disk; its launch reports a compiler error."""
    import cupy  # which only who asks for kernels needs

    from fusec.gpu.launch.kernel_launcher import function_of, is_here  # needs cupy

    architecture = question["architecture"]
    try:
        if not architecture or is_here(architecture):
            function_of(question["kernel"], question["entry"], question["meets"], architecture)
    except cupy.cuda.compiler.CompileException as error:
        return {"failed": str(error)}
    return {"compiled": question["entry"]}


Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(name: str, device: bool, begin: Callable[[Target], tuple[Any, Answer]]) -> int:
    """Run a worker until its input ends.

    begin: called once cuDNN can be imported; returns the cudnn module and the function that answers a question

    Each line is one JSON object: first `ready` or `failed`, then an answer to each question, or `defect` with a
    traceback for an error of fusec, which is no verdict.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends the input
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not break the protocol
    target = load(name)
    try:
        nvrtc = check_nvrtc(load_nvrtc(), target.sm) if device else bring_up(target.sm)
        cudnn, respond = begin(target)
        ready = {"cudnn": cudnn.backend_version(), "nvrtc": nvrtc}
    except ModuleNotFoundError as error:
        out.write(json.dumps({"failed": f"{error}: {INSTALL}; or take --target cpu"}) + "\n")
        return 2
    except (FusecError, ImportError, OSError, RuntimeError) as error:
        out.write(json.dumps({"failed": str(error)}) + "\n")
        return 2
    out.write(json.dumps({"ready": ready}) + "\n")
    for line in sys.stdin:
        try:
            answer = respond(json.loads(line))
        except Exception:  # noqa: BLE001  # the parent raises it, with this traceback
            answer = {"defect": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")
    return 0
