"""Share constants, workers and tuned choices among programs of one model for several input shapes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from fusec.execution.compilation import Compiled
from fusec.execution.shared_weights import SharedWeights
from fusec.gpu import device
from fusec.gpu.autotune.step_choices import TunedChoices
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.worker_processes.build_pool import BuildPool
from fusec.gpu.shape_transfer.transfer_choices import TransferredChoices, transfer
from fusec.gpu.shape_transfer.transfer_plans import NEAR, SizePlans
from fusec.ir import Graph
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.partition import Judge
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice, Entry
from fusec.system.dataclass import dataclass
from fusec.targets.target import Target

if TYPE_CHECKING:
    from fusec.runtime import Executable

MEASURED = 8  # number of input shapes whose choices are stored; the oldest is deleted first


@dataclass
class ShapeFamily:
    """State that programs of one model for several input shapes share.

    weights: constants, each stored once.
    judge: decides what fuses; the first program sets it.
    workers: ask cuDNN and build plans, where plans are not transferred; the first program sets them.
    share_kernels: use kernels that cuDNN compiles once for all shapes.
    first_plans: take cuDNN's first plan of each graph. The workers return the plans that they build as an answer.
    transfers: reuse plans and choices of one input shape for another.
    more_sizes: other input shapes may follow.
    """

    weights: SharedWeights = field(default_factory=SharedWeights)
    judge: Judge | None = None
    workers: Oracle | None = None
    share_kernels: bool = False
    first_plans: bool = False
    transfers: bool = False
    more_sizes: bool = True
    _kernels: Any = None
    _oracle: Oracle | None = None
    _sizes: SizePlans | None = None
    _last: tuple[Graph, weakref.ref[Any]] | None = None  # imported model and backend of the last program
    _tuned: list[tuple[Compiled, weakref.ref[Executable]]] = field(
        default_factory=list[tuple[Compiled, "weakref.ref[Executable]"]]
    )

    def shared_kernels(self) -> Any:
        """Return cuDNN's cache of kernels for all shapes; None if kernels are not shared. Needs a GPU."""
        if self.share_kernels and self._kernels is None:
            from fusec.gpu.cudnn.plans.emit import kernel_cache  # needs cudnn, which only a GPU machine must have

            self._kernels = kernel_cache()
        return self._kernels

    def oracle(self, target: Target, plan_filter: PlanFilter | None = None) -> Oracle:
        """Start the worker processes that ask cuDNN about plans of a filter, and return them.

        With `first_plans`, a verdict is reused for all other shapes, because building the plan checks it.
        Where plans are timed, a verdict is reused for near shapes only, and cuDNN is asked about others.
        """
        here = device.is_present(target)
        hand_over = here and self.first_plans
        reuse = self.share_kernels or not hand_over
        max_factor = 0.0 if not self.transfers else math.inf if self.first_plans else NEAR
        self._oracle = Oracle(
            target,
            device=here,
            reuse_builds=reuse,
            hand_over=hand_over,
            max_factor=max_factor,
            plan_filter=plan_filter,
        )
        return self._oracle

    def builders(self) -> BuildPool | None:
        """Return the workers that build plans; None with shared kernels, which exist in this process only."""
        return None if self._oracle is None or self.share_kernels else BuildPool(self._oracle)

    def plans(self, graphs: Mapping[str, CudnnGraph], refused: list[CudnnGraph]) -> Iterator[tuple[CudnnGraph, Entry]]:
        """Yield plans as they become ready: those that workers built as an answer, then those of other shapes.

        refused: this list receives the graphs for which no plan builds, although the verdict of another shape was
            legal.
        """
        if self._oracle is None:
            return
        built, self._oracle.built = self._oracle.built, {}
        for key, (plan, blob) in built.items():
            if key in graphs and self._oracle.plans(graphs[key])[:1] == (plan,):
                yield graphs[key], Entry(Choice(plan.engine, plan.knobs, plan.workspace_bytes), blob)
        for graph, entry in self._sizes_of(self._oracle).plans_for(g for key, g in graphs.items() if key not in built):
            if entry is not None:
                yield graph, entry
                continue
            refused.append(graph)
            self._oracle.ask_again(graph)

    def prefetch_plans(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Start building the plans that a program for these shapes will need, as predicted from earlier shapes."""
        if self._sizes is None or self._last is None:
            return
        source, backend = self._last[0], self._last[1]()
        if any(v.name not in shapes or len(shapes[v.name]) != v.type.rank for v in source.inputs):
            return
        sizes = tuple(int(size) for v in source.inputs for size in shapes[v.name])
        self._sizes.prefetch(sizes, list if backend is None else backend.plans.without_blob)

    def named_plans(self, graphs: Iterable[CudnnGraph]) -> dict[str, Choice]:
        """Return the plans that graphs take over from near shapes, by key."""
        return {} if self._sizes is None else self._sizes.choices_near(graphs)

    def record(self, executable: Executable, backend: Any, graphs: Mapping[str, CudnnGraph], *, measured: bool) -> None:
        """Store the plans that a program runs on a GPU, for other shapes.

        measured: the program's choices were tuned for its own shape, so other shapes may reuse them.
        """
        if self._oracle is not None and self.more_sizes:
            self._sizes_of(self._oracle).learn(_sizes(executable.compiled.source), graphs.values(), backend.choices())
        self._last = executable.compiled.source, weakref.ref(backend)
        if measured and not self.first_plans:
            self._tuned = [*self._tuned[-MEASURED + 1 :], (executable.compiled, weakref.ref(executable))]

    def transferred(self, compiled: Compiled) -> TransferredChoices | None:
        """Return the program with the choices of a near shape; None if no near shape has the same partitions."""
        sizes = _sizes(compiled.source)
        near = [
            (distance, place)
            for place, (other, _) in enumerate(self._tuned)
            if (distance := _distance(sizes, _sizes(other.source))) <= NEAR
        ]
        if not near:
            return None
        other, running = self._tuned[min(near)[1]]
        assert isinstance(other.tuned, TunedChoices)
        executable = running()
        side_by_side = executable is not None and executable.recorded[0] > 1
        tuned = replace(other.tuned, side_by_side=other.tuned.side_by_side or side_by_side)
        return transfer(tuned, other.program, compiled.program, compiled.figures, compiled.options.as_source)

    def _sizes_of(self, oracle: Oracle) -> SizePlans:
        self._sizes = self._sizes or SizePlans(oracle)
        return self._sizes


def _sizes(source: Graph) -> tuple[int, ...]:
    return tuple(size for value in source.inputs for size in value.type.shape)


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> Fraction:
    """Return the largest factor by which a dim differs."""
    if len(a) != len(b) or 0 in (*a, *b):
        return Fraction(1 << 62)
    return max((max(Fraction(x, y), Fraction(y, x)) for x, y in zip(a, b, strict=True)), default=Fraction(1))
