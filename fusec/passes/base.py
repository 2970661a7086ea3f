"""Define passes, the options that all of them see, and the runner that verifies after each."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from fusec.errors import FusecError, VerifyError
from fusec.ir import DType, Graph, print_graph
from fusec.passes.pass_names import current_names
from fusec.passes.rewriting.rewriter import Rewriter, rewrite
from fusec.plans.plan_filter import PlanFilter
from fusec.system.dataclass import dataclass
from fusec.targets.target import DEFAULT, Target, load

FASTEST = "fastest"  # the rounding that may change where, or how exactly, activations are rounded to 8 bits, for speed
ROUNDINGS = ("fused", "source", FASTEST)
CONCAT_IN_PLACE = "concat_in_place"  # the name in `disable` of writing the operands of a concat into its result
ROUND_ACTIVATIONS = "round_activations"  # the name in `disable` of rounding activations to 8 bits
# Two names in `disable` that stand for options of their own; `Options.from_names` reads them.
UNROUNDED = "unrounded"  # rounding="source": no fusion that keeps a value in fp32 that the model rounds
UNORDERED = "unordered_sums"  # deterministic=True: no plan that gives other bits from one run to the next
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


Orders = tuple[tuple[str, tuple[int, ...]], ...]  # memory orders by name


def names_of(option: str, given: object) -> tuple[str, ...]:
    """Return the names given to an option, one or several.

    Raises FusecError if it is neither a name nor a list of names.
    """
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in cast("Collection[Any]", names)):
        raise FusecError(f"{option} takes a name or a list of names, not {given!r}")
    return tuple(cast("Collection[str]", names))


@dataclass(frozen=True)
class Options:
    """Options of one compilation that the passes and the partitioner read.

    precision: decides the storage type of floating-point tensors, and if fp32 operands may be rounded to tf32.
    disable: names of passes and rules to leave out.
    state: inputs that stay on the device between calls, each with the output that replaces it, or an empty name.
    orders: memory orders that the caller chose for inputs and outputs; the others are row-major.
    rounding: `source` rounds values to 16 bits wherever the model does, `fused` and `fastest` only where a step ends.
    deterministic: a program must give the same bits each time it runs.
    plans: the plans of cuDNN that may be used, apart from `deterministic`.
    target: GPU whose figures say if a rewrite gains.
    """

    precision: str = "fp32"
    disable: frozenset[str] = field(default_factory=frozenset[str])
    state: tuple[tuple[str, str], ...] = ()
    orders: Orders = ()
    rounding: str = "fused"
    deterministic: bool = False
    plans: PlanFilter = field(default_factory=PlanFilter)
    target: Target = field(default_factory=lambda: load(DEFAULT), compare=False)

    @classmethod
    def from_names(
        cls,
        precision: str,
        names: Collection[str],
        *,
        state: tuple[tuple[str, str], ...] = (),
        orders: Orders = (),
        rounding: str = "fused",
        deterministic: bool = False,
        plans: PlanFilter | None = None,
    ) -> Options:
        """Make options from the names a caller disables, of which two stand for `rounding` and `deterministic`."""
        rounding = "source" if UNROUNDED in names else rounding
        disable = current_names(names) - {UNROUNDED, UNORDERED}
        deterministic = deterministic or UNORDERED in names
        return cls(precision, disable, state, orders, rounding, deterministic, plans or PlanFilter())

    @property
    def disabled_names(self) -> list[str]:
        """The names that `from_names` reads, sorted, as files and reports list them."""
        unrounded = {UNROUNDED} if self.as_source else set[str]()
        return sorted(self.disable | unrounded | ({UNORDERED} if self.deterministic else set[str]()))

    @property
    def plan_filter(self) -> PlanFilter:
        """Return the filter of the plans that the program may use."""
        return replace(self.plans, deterministic=self.deterministic)

    @property
    def storage(self) -> DType:
        """The floating-point type tensors are stored in."""
        return {"fp16": DType.F16, "bf16": DType.BF16}.get(self.precision, DType.F32)

    @property
    def as_source(self) -> bool:
        """Tell if values are rounded to 16 bits wherever the model rounds them."""
        return self.rounding == "source"

    @property
    def tensor_cores(self) -> bool:
        """Tell if engines that round fp32 operands to tf32 may be used."""
        return self.precision != "fp32"


class Pass(Protocol):
    """Protocol of passes. A pass with options of its own is a frozen dataclass."""

    name: ClassVar[str]

    def run(self, graph: Graph, options: Options) -> None:
        """Change the graph in place; its meaning stays (up to rounding)."""
        ...


class RulePass(Pass):
    """A pass that applies its rewrite rules all over the graph."""

    rules: ClassVar[tuple[Rewriter, ...]]

    def run(self, graph: Graph, options: Options) -> None:
        rewrite(graph, self.rules, options.disable)


def run(
    pipeline: Sequence[Pass],
    graph: Graph,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> Graph:
    """Run the passes in order on `graph`; prune dead code and verify after each that changed something.

    With the environment variable FUSEC_DUMP=DIR every state is written to DIR/NN-pass.txt.

    Raises VerifyError: names the pass that broke the graph.
    """
    options = options or Options()
    dump = os.environ.get("FUSEC_DUMP")
    if dump:
        _write(Path(dump) / "00-input.txt", graph)
    pruned = -1  # how many edits the graph had then
    for index, step in enumerate(pipeline, 1):
        if step.name in options.disable:
            continue
        if progress is not None:
            progress(step.name)
        step.run(graph, options)
        if graph.edits != pruned:
            graph.prune()
            pruned = graph.edits
        try:
            graph.verify_changes()
        except VerifyError as error:
            raise VerifyError(f"after pass {step.name}: {error}") from error
        if dump:
            _write(Path(dump) / f"{index:02}-{step.name}.txt", graph)
    return graph


def _write(path: Path, graph: Graph) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(print_graph(graph, locations=True) + "\n", encoding="utf-8")
