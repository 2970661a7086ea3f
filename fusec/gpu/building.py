"""The child's side of a question: build plans of a graph and serialize them, or read one back."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

from fusec.cudnn_graph import CudnnGraph
from fusec.gpu.reasons import reason_of
from fusec.gpu.worker import PYTHON_ENGINES, knobs_of
from fusec.hazards import wrong_plan
from fusec.plans import BLAS, Choice, Knobs
from fusec.target import Target

# Engines that cuDNN 9.19 offers on an H200 and does not build devicelessly, not even when named.
DEVICE_ONLY = frozenset({4, 53})


class Builder:
    """Builds and serializes plans for a target, or, with a handle, for this machine's GPU; or reads one back."""

    def __init__(self, target: Target, handle: Any):
        import cudnn  # only after the driver and NVRTC are loaded

        self.cudnn = cudnn
        self.target = target
        self.handle = handle
        self.declined = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        from fusec.gpu.emit import emit

        graph = CudnnGraph.from_json(question["graph"])
        g = emit(graph, handle=self.handle, target=self.target if self.handle is None else None)
        if "blob" in question:
            try:
                g.deserialize(list(base64.b64decode(question["blob"])))
                return {"workspace": g.get_workspace_size()}
            except self.declined as error:
                return {"failed": f"cuDNN does not read this serialized plan: {': '.join(reason_of(error))}"}
        try:
            g.validate()
            g.build_operation_graph()
            g.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        except self.declined as error:
            return {"failed": f"cuDNN has no plan for {self.target.name}: {': '.join(reason_of(error))}"}
        if not graph.tensor_cores:
            g.deselect_numeric_notes([self.cudnn.numerical_note.TENSOR_CORE])
        if question.get("deterministic"):
            g.deselect_numeric_notes([self.cudnn.numerical_note.NONDETERMINISTIC])
        named = [Choice.from_json(choice) for choice in question["choices"]]
        if named:
            return self._named(g, named)
        skip = {(engine, tuple((k, v) for k, v in knobs)) for engine, knobs in question["skip"]}
        return self._first(g, graph, skip, question["count"])

    def _named(self, g: Any, named: list[Choice]) -> dict[str, Any]:
        offered = {self._identity(g, i): i for i in range(g.get_execution_plan_count())}
        entries: list[dict[str, Any]] = []
        for choice in named:
            if choice.engine == BLAS:  # another library's, which has no word without a device
                entries.append({"choice": choice.to_json(), "blob": None})
                continue
            try:
                index = offered.get(choice.identity)
                if index is None:  # not in its list devicelessly, but perhaps it builds
                    g.create_execution_plan(choice.engine, {self.cudnn.knob_type(k): v for k, v in choice.knobs})
                    index = g.get_execution_plan_count() - 1
                entries.append(self._built(g, index, choice))
            except self.declined as error:
                if choice.engine in DEVICE_ONLY and self.handle is None:
                    entries.append({"choice": choice.to_json(), "blob": None})
                    continue
                what = f"engine {choice.engine} with knobs {dict(choice.knobs)}"
                return {"failed": f"cuDNN builds no plan of {what} for {self.target.name}: {reason_of(error)[1]}"}
        return {"entries": entries}

    def _first(self, g: Any, graph: CudnnGraph, skip: set[tuple[int, Knobs]], count: int) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        seen: set[tuple[int, Knobs]] = set(skip)
        reason = "it offers none that may be used"
        for index in range(g.get_execution_plan_count()):
            engine, knobs = identity = self._identity(g, index)
            if identity in seen or not 0 <= engine < PYTHON_ENGINES or wrong_plan(graph, engine, dict(knobs)):
                continue
            seen.add(identity)
            try:
                entries.append(
                    self._built(g, index, Choice(engine, knobs, complete=False))
                )  # the device may know a better
            except self.declined as error:
                reason = reason_of(error)[1]
            if len(entries) == count:
                break
        return {"entries": entries} if entries else {"failed": f"no plan for {self.target.name} was built: {reason}"}

    @staticmethod
    def _identity(g: Any, index: int) -> tuple[int, Knobs]:
        engine, knobs = g.get_engine_and_knobs_at_index(index)
        return int(engine), tuple(sorted(knobs_of(knobs).items()))

    def _built(self, g: Any, index: int, choice: Choice) -> dict[str, Any]:
        g.build_plan_at_index(index)  # which selects it: `serialize` writes the plan selected
        choice = replace(choice, workspace_bytes=int(g.get_workspace_size_plan_at_index(index)))
        try:
            blob = base64.b64encode(bytes(g.serialize())).decode()
        except self.declined:
            if self.handle is None:
                raise
            blob = None  # who has the device can build it there
        return {"choice": choice.to_json(), "blob": blob}
