"""Tell what a user would want to know after a compilation: steps outside cuDNN, growth, and what will be slow."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from fusec.diagnostics.explain.float_edges import float_edges, is_integer_product
from fusec.diagnostics.explain.table import listed
from fusec.errors import LoweringError
from fusec.execution.compilation import Compiled
from fusec.ir import Constant, Graph, Node
from fusec.lower_cudnn import lower
from fusec.ops import ANCHORS
from fusec.passes.base import FASTEST
from fusec.passes.partition.equivalent_spellings import IN_HALVES
from fusec.plans.verdict import UNASKED, Refused
from fusec.schedule.program import Kind, Partition, Program, body_of
from fusec.system.printable import printable
from fusec.targets.target import CPU

MANY_LAUNCHES = 200
GROWTH = 3  # launches or ops for each node of the model, from which it counts as grown
FEW = 20  # launches or ops that are too few to matter, however much they grew

_NAMED, _WIDTH = 3, 80  # things that a hint names, and their room


@dataclass(frozen=True)
class Hint:
    """One thing that a user may want to know.

    kind: `precision`, `unrolled`, `launches`, `quantised`, `rounding` or `budget`.
    grew: there are GROWTH times as many launches or ops as the model has nodes.
    """

    kind: str
    text: str
    grew: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def hints(compiled: Compiled) -> tuple[Hint, ...]:
    """Return the hints about a compilation, at most one of each kind. cuDNN is asked nothing."""
    if compiled.target.name == CPU:
        return ()
    found = (
        *(_precision(compiled), _unrolled(compiled.source), launches(compiled)),
        *(_quantised(compiled), _rounding(compiled), _unasked(compiled)),
    )
    return tuple(hint for hint in found if hint is not None)


def _precision(compiled: Compiled) -> Hint | None:
    """Tell how many steps true fp32 leaves out of cuDNN: those for which it would have to use tensor cores."""
    if compiled.options.tensor_cores:
        return None
    refused = {
        node
        for refusal in compiled.program.refusals
        if isinstance(refusal.reason, Refused) and refusal.reason.needs_tensor_cores
        for node in refusal.nodes
    }
    steps = [step for step in compiled.program.steps if step.kind is Kind.KERNEL]
    products = ((node for node in step.nodes if isinstance(node.op, ANCHORS)) for step in steps)
    count = sum(any(node in refused or _needs_tensor_cores(node) for node in nodes) for nodes in products)
    if not count:
        return None
    plural = "s" * (count > 1)
    return Hint(
        "precision",
        f"fp32 leaves {count} step{plural} out of cuDNN, because it would compute them with tensor cores. --precision "
        "tf32 lets cuDNN take them, and fp16 or bf16 may, with fewer digits",
    )


def _needs_tensor_cores(node: Node) -> bool:
    """Tell if fusec can write an op as a cuDNN graph with tensor cores alone. cuDNN is not asked."""
    body = body_of(node.graph, [node])
    try:
        lower(body, tensor_cores=True)
    except LoweringError:
        return False
    try:
        lower(body, tensor_cores=False)
    except LoweringError:
        return True
    return False


def _unrolled(source: Graph) -> Hint | None:
    """Tell how much a model grew when it was imported, and which of its nodes became many ops."""
    became = Counter(node.origin[0] for node in source.nodes if node.origin and not isinstance(node.op, Constant))
    ops = sum(became.values())
    if ops < GROWTH * len(became) or max(became.values(), default=0) < FEW:
        return None
    return Hint(
        "unrolled",
        f"the model's {_nodes(len(became))} became {ops} ops, because loops are unrolled and composite ops are written "
        f"out; most come from {_most(became, 'ops')}",
        grew=True,
    )


def launches(compiled: Compiled) -> Hint | None:
    """Tell that a program has many launches, and which nodes of the model they come from."""
    program = compiled.program
    nodes = {node.origin[0] for node in compiled.source.nodes if node.origin}
    grew = bool(nodes) and program.launches >= max(GROWTH * len(nodes), FEW)
    if program.launches < MANY_LAUNCHES and not grew:
        return None
    of_model = f", from {_nodes(len(nodes))} of the model" if nodes else ""
    return Hint(
        "launches",
        f"{program.launches} launches{of_model}, and each takes its time, also if it computes little; "
        f"most come from {_most(_sources(program, grew), 'launches')}",
        grew,
    )


def _unasked(compiled: Compiled) -> Hint | None:
    """Tell how many steps run as kernels because the budget was spent before cuDNN was asked about fusing them."""
    left = {node for refusal in compiled.program.refusals if refusal.reason == UNASKED for node in refusal.nodes}
    steps = [step for step in compiled.program.steps if step.kind is Kind.KERNEL]
    count = sum(any(node in left for node in step.nodes) for step in steps)
    if not count:
        return None
    plural = "s" * (count > 1)
    return Hint(
        "budget",
        f"{count} step{plural} run{'s' * (count == 1)} unfused, because the budget was spent before cuDNN was asked "
        "about them. Answers are stored: compile again to ask about the rest, or raise --budget",
    )


def _sources(program: Program, grew: bool) -> Counter[str]:
    """Count launches by the node of the model they come from; if none became several, by their ops."""
    steps = [step for step in program.steps if step.kind is not Kind.VIEW]

    def origin(step: Partition) -> str:
        """Return the node that a step's products come from; of a rewritten op the op itself."""
        return next((node.origin[0] for node in reversed(step.nodes) if node.origin), step.signature)

    return Counter(map(origin, steps) if grew else (step.signature for step in steps))


def _quantised(compiled: Compiled) -> Hint | None:
    """Tell how many products of a quantised model stay in floats, with the most frequent reason."""
    floats = float_edges(compiled)
    if not floats:
        return None
    ((reason, count), *others) = Counter(edge.reason for edge in floats).most_common()
    first = next(edge for edge in floats if edge.reason == reason)
    where = listed(first.nodes or (first.value,), _WIDTH)
    more = f", and {sum(n for _, n in others)} for other reasons" if others else ""
    return Hint(
        "quantised",
        f"{len(floats)} values of the quantised model stay in floats: {count} because {printable(reason)} "
        f"(first at {where}){more}. `fusec explain` lists them",
    )


def _rounding(compiled: Compiled) -> Hint | None:
    """Tell that most products of integers run in fp16, where the float form of the whole model may be faster.

    Only `rounding="fastest"` may take that form: it rounds no activations, so results differ by up to half a step of
    each. Otherwise they are within one step of those that the model defines.
    """
    if compiled.options.rounding == FASTEST:
        return None
    steps = [step for step in compiled.program.steps if any(map(is_integer_product, step.nodes))]
    count = sum(IN_HALVES in step.spelling for step in steps)
    if not count or 2 * count < len(steps):
        return None
    return Hint(
        "rounding",
        f"{count} of {len(steps)} products of integers were measured to be faster in fp16, so the model may be slower "
        "than its float form. --rounding fastest lets both forms compete; in floats, activations are not rounded",
    )


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _most(counts: Counter[str], what: str) -> str:
    """Name the largest of some counts, without those that matter little next to the first."""
    named = counts.most_common(_NAMED)
    large = [(name, count) for name, count in named if 10 * count >= named[0][1]]
    return ", ".join(f"{listed((name,), _WIDTH)} ({count} {what})" for name, count in large)
