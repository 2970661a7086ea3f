"""Define passes, the options that all of them see, and the runner that verifies after each."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from fusec.errors import FusecError, VerifyError
from fusec.ir import DType, Graph, print_graph

ROUNDINGS = ("fused", "source")
UNROUNDED = "unrounded"  # what `disable` calls the fusions that keep a value in fp32 that the model rounds
CONCAT_IN_PLACE = "concat_in_place"  # what `disable` calls it that concats are written to where they are joined
UNORDERED = "unordered_sums"  # what `disable` calls plans that give other bits from one run to the next
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


Orders = tuple[tuple[str, tuple[int, ...]], ...]  # memory orders by name


def names_of(option: str, given: object) -> tuple[str, ...]:
    """Return the names given to an option, one or several.

    Raises FusecError: when it is neither a name nor a list of names.
    """
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in cast("Collection[Any]", names)):
        raise FusecError(f"{option} takes a name or a list of names, not {given!r}")
    return tuple(cast("Collection[str]", names))


@dataclass(frozen=True)
class Options:
    """What the user asked for. `precision` decides the storage type of floating-point tensors and
    whether fp32 operands may be rounded to tf32; `disable` names passes and rules to leave out.

    `state` lists the inputs that stay on the device between calls, each with the output that replaces it after
    a call, or an empty name. `orders` are the memory orders that the caller chose for inputs and outputs; those that
    are not in it lie row-major."""

    precision: str = "fp32"
    disable: frozenset[str] = field(default_factory=frozenset[str])
    state: tuple[tuple[str, str], ...] = ()
    orders: Orders = ()

    @property
    def storage(self) -> DType:
        """The floating-point type tensors are stored in."""
        return {"fp16": DType.F16, "bf16": DType.BF16}.get(self.precision, DType.F32)

    @property
    def as_source(self) -> bool:
        """Whether values are to be rounded to 16 bits wherever the model rounds them."""
        return UNROUNDED in self.disable

    @property
    def deterministic(self) -> bool:
        """Whether a program must give the same bits each time it runs."""
        return UNORDERED in self.disable

    @property
    def tensor_cores(self) -> bool:
        """Whether engines that round fp32 operands to tf32 may be used."""
        return self.precision != "fp32"


class Pass(Protocol):
    """Protocol of passes: a frozen dataclass whose fields are the pass's own options."""

    name: ClassVar[str]

    def run(self, graph: Graph, options: Options) -> None:
        """Change the graph in place; its meaning stays (up to rounding)."""
        ...


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
