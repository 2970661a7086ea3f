"""Build plans in a worker process, and return them serialized."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fusec.errors import LoweringError
from fusec.gpu.cudnn.engine_ids import PYTHON_ENGINES, knobs_of
from fusec.gpu.cudnn.error_messages import reason_of
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.known_bugs import wrong_plan
from fusec.plans.plan_record import Choice
from fusec.targets.target import Target


class PlanBuilder:
    """Builder of plans on this machine's GPU, or without a device for a target; it holds kernels for all sizes."""

    def __init__(self, cudnn: Any, handle: Any, target: Target):
        self._cudnn, self._handle, self._target = cudnn, handle, target
        self._kernels: Any = None  # cuDNN's cache of what it compiled for all sizes
        self._declined = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer with a plan as JSON data and its build time in seconds, or with the reason why there is none.

        With `if_compiled` there is also none if the named plan is precompiled.
        """
        data, graph = question["choice"], CudnnGraph.from_json(question["graph"])
        named = None if data is None else Choice.from_json(data)
        try:
            if named is not None and question.get("if_compiled") and self._is_precompiled(graph, named):
                return {"failed": "it is precompiled"}
            return self.build(graph, named, question["all_sizes"], bool(question.get("deterministic")))
        except LoweringError as error:
            return {"failed": str(error)}
        except self._declined as error:
            return {"failed": ": ".join(reason_of(error))}

    def build(
        self, graph: CudnnGraph, named: Choice | None, all_sizes: bool, deterministic: bool = False
    ) -> dict[str, Any]:
        """Build the named plan without listing plans; where that fails, the first of cuDNN's list that builds.

        deterministic: no plan that cuDNN marks as not deterministic
        """
        if named is not None and wrong_plan(graph, named.engine, dict(named.knobs)) is None:
            try:
                g = self._begun(graph, all_sizes)
                g.create_execution_plan(named.engine, {self._cudnn.knob_type(k): v for k, v in named.knobs})
                return self._built(g, graph, g.get_execution_plan_count() - 1, named, deterministic)
            except self._declined:  # also where the frontend does not know a knob of cuDNN
                pass
        g = self._begun(graph, all_sizes)
        g.create_execution_plans([self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK])
        failed = "it offers none that may be used"
        for index, choice in self._offered(g, graph, named):
            try:
                return self._built(g, graph, index, choice, deterministic)
            except self._declined as error:
                failed = ": ".join(reason_of(error))
        return {"failed": failed}

    def _is_precompiled(self, graph: CudnnGraph, named: Choice) -> bool:
        g = self._begun(graph, False)
        g.create_execution_plans([self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK])
        place = next((i for i, choice in self._offered(g, graph, named) if choice.identity == named.identity), None)
        note = self._cudnn.behavior_note.RUNTIME_COMPILATION
        return place is not None and note not in g.get_behavior_notes_for_plan_at_index(place)

    def _begun(self, graph: CudnnGraph, all_sizes: bool) -> Any:
        from fusec.gpu.cudnn.emit import emit, kernel_cache  # needs cudnn, which the parent need not have

        if all_sizes and self._kernels is None:
            self._kernels = kernel_cache()
        target = None if self._handle else self._target
        g = emit(graph, handle=self._handle, target=target, kernels=self._kernels if all_sizes else None)
        g.validate()
        g.build_operation_graph()
        return g

    @staticmethod
    def _offered(g: Any, graph: CudnnGraph, first: Choice | None) -> Iterator[tuple[int, Choice]]:
        """Yield the index and choice of each plan that cuDNN offers, in its order, `first` before the others."""
        found: list[tuple[int, Choice]] = []
        for index in range(g.get_execution_plan_count()):
            engine, knobs = g.get_engine_and_knobs_at_index(index)
            choice = Choice(int(engine), tuple(sorted(knobs_of(knobs).items())))
            if 0 <= choice.engine < PYTHON_ENGINES and not wrong_plan(graph, choice.engine, dict(choice.knobs)):
                found.append((index, choice))
        yield from (each for each in found if first is not None and each[1].identity == first.identity)
        yield from (each for each in found if first is None or each[1].identity != first.identity)

    def _built(self, g: Any, graph: CudnnGraph, index: int, choice: Choice, deterministic: bool) -> dict[str, Any]:
        left_out = {"TENSOR_CORE": not graph.tensor_cores, "NONDETERMINISTIC": deterministic}
        notes = [getattr(self._cudnn.numerical_note, name) for name, out in left_out.items() if out]
        if notes:  # takes effect when a plan is built
            g.deselect_numeric_notes(notes)
        start = time.perf_counter()
        g.build_plan_at_index(index)  # also selects it for `serialize`
        seconds = time.perf_counter() - start
        choice = replace(choice, workspace_bytes=int(g.get_workspace_size_plan_at_index(index)))
        blob = base64.b64encode(bytes(g.serialize())).decode()
        return {"choice": choice.to_json(), "blob": blob, "seconds": seconds}
