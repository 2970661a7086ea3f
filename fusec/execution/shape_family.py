"""What programs of one model, compiled for several shapes, have in common, and what one takes over from another."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from fusec.execution.compilation import Compiled
from fusec.execution.shared_weights import SharedWeights
from fusec.gpu import device
from fusec.gpu.autotune.step_candidates import TunedChoices
from fusec.gpu.cudnn.build_pool import BuildPool
from fusec.gpu.cudnn.legality import Oracle
from fusec.gpu.shape_transfer.transfer_choices import TransferredChoices, transfer
from fusec.gpu.shape_transfer.transfer_plans import NEAR, SizePlans
from fusec.ir import Graph
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.partition import Oracle as Judge
from fusec.plans.plan_record import Choice, Entry
from fusec.targets.target import Target

if TYPE_CHECKING:
    from fusec.runtime import Executable

MEASURED = 8  # sizes that others may follow, the last ones


@dataclass
class Family:
    """What programs of one model, compiled alike for several shapes, have in common: constants, the processes in which
    cuDNN is asked, and, if `share_kernels`, what cuDNN compiles at run time. first_plans: cuDNN's first plan of each
    graph is the one to take; those processes hand it over. carries: sizes take over plans and forms from others.
    more_sizes: there may be others."""

    weights: SharedWeights = field(default_factory=SharedWeights)
    judge: Judge | None = None
    share_kernels: bool = False
    first_plans: bool = False
    carries: bool = False
    more_sizes: bool = True
    _kernels: Any = None
    _oracle: Oracle | None = None
    _sizes: SizePlans | None = None
    _last: tuple[Graph, weakref.ref[Any]] | None = None  # the model as imported for the last program, and its backend
    _decided: list[tuple[Compiled, weakref.ref[Executable]]] = field(
        default_factory=list[tuple[Compiled, "weakref.ref[Executable]"]]
    )

    def kernels(self) -> Any:
        """cuDNN's cache of them; None if they are not shared. Needs a GPU."""
        if self.share_kernels and self._kernels is None:
            from fusec.gpu.cudnn.emit import kernel_cache  # needs cudnn, which only a GPU machine must have

            self._kernels = kernel_cache()
        return self._kernels

    def oracle(self, target: Target) -> Oracle:
        """Whom to ask. What is built to be handed over need not be known from graphs that are alike. What is believed
        of sizes is soon put to the test, but not where plans are timed: then cuDNN is asked about far ones."""
        here = device.is_present(target)
        hand_over = here and self.first_plans
        kin = self.share_kernels or not hand_over
        sizes = 0.0 if not self.carries else math.inf if self.first_plans else NEAR
        self._oracle = Oracle(target, device=here, kin=kin, hand_over=hand_over, sizes=sizes)
        return self._oracle

    def builders(self) -> BuildPool | None:
        """Who builds plans that are compiled at run time; kernels for all sizes are this process's alone."""
        return None if self._oracle is None or self.share_kernels else BuildPool(self._oracle)

    def plans(self, graphs: Mapping[str, CudnnGraph], refused: list[CudnnGraph]) -> Iterator[tuple[CudnnGraph, Entry]]:
        """Plans that were built to ask cuDNN, and those of other sizes in this one, as they are ready. refused: gets
        the graphs that were believed to be legal, as they are in other sizes, and are not."""
        if self._oracle is None:
            return
        built, self._oracle.built = self._oracle.built, {}
        for key, (plan, blob) in built.items():
            if key in graphs:
                yield graphs[key], Entry(Choice(plan.engine, plan.knobs, plan.workspace_bytes), blob)
        for graph, entry in self._sizes_of(self._oracle).plans_for(g for key, g in graphs.items() if key not in built):
            if entry is not None:
                yield graph, entry
                continue
            refused.append(graph)
            self._oracle.doubt(graph)

    def foresee(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin to make the plans that a program for these shapes will need, as far as those before tell."""
        if self._sizes is None or self._last is None:
            return
        source, backend = self._last[0], self._last[1]()
        if any(v.name not in shapes or len(shapes[v.name]) != v.type.rank for v in source.inputs):
            return
        sizes = tuple(int(size) for v in source.inputs for size in shapes[v.name])
        self._sizes.prefetch(sizes, list if backend is None else backend.plans.without_blob)

    def named(self, graphs: Iterable[CudnnGraph]) -> dict[str, Choice]:
        """The plans that graphs take over from sizes near theirs, by key."""
        return {} if self._sizes is None else self._sizes.choices_near(graphs)

    def took(self, executable: Executable, backend: Any, graphs: Mapping[str, CudnnGraph], decided: bool) -> None:
        """Learn which plans a program runs on a GPU; decided: and in which forms, which others may follow."""
        if self._oracle is not None and self.more_sizes:
            self._sizes_of(self._oracle).learn(_sizes(executable.compiled.source), graphs.values(), backend.choices())
        self._last = executable.compiled.source, weakref.ref(backend)
        if decided and not self.first_plans:
            self._decided = [*self._decided[-MEASURED + 1 :], (executable.compiled, weakref.ref(executable))]

    def followed(self, compiled: Compiled) -> TransferredChoices | None:
        """The program in the forms that were decided for the size nearest to its own, if one is near and cut alike."""
        sizes = _sizes(compiled.source)
        near = [
            (distance, place)
            for place, (other, _) in enumerate(self._decided)
            if (distance := _distance(sizes, _sizes(other.source))) <= NEAR
        ]
        if not near:
            return None
        other, running = self._decided[min(near)[1]]
        assert isinstance(other.tuned, TunedChoices)
        executable = running()
        beside = executable is not None and executable.recorded[0] > 1
        decided = replace(other.tuned, side_by_side=other.tuned.side_by_side or beside)
        return transfer(decided, other.program, compiled.program, compiled.options.as_source)

    def _sizes_of(self, oracle: Oracle) -> SizePlans:
        self._sizes = self._sizes or SizePlans(oracle)
        return self._sizes


def _sizes(source: Graph) -> tuple[int, ...]:
    return tuple(size for value in source.inputs for size in value.type.shape)


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> Fraction:
    """By how much a dim differs at most, as a factor."""
    if len(a) != len(b) or 0 in (*a, *b):
        return Fraction(1 << 62)
    return max((max(Fraction(x, y), Fraction(y, x)) for x, y in zip(a, b, strict=True)), default=Fraction(1))
