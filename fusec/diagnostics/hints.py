"""Tell what a user would want to know after a compilation: steps outside cuDNN, growth, and what will be slow."""

from __future__ import annotations

from collections import Counter

from fusec.diagnostics.explain.float_edges import float_edges, is_integer_product
from fusec.diagnostics.launch_hint import FEW, GROWTH, WIDTH, Hint, launches, most_text, nodes_text
from fusec.diagnostics.text_table import listed
from fusec.errors import LoweringError
from fusec.execution.compilation import Compiled
from fusec.ir import Constant, Graph, Node
from fusec.lower_cudnn import lower
from fusec.ops import ANCHORS
from fusec.passes.base import FASTEST
from fusec.passes.partition.equivalent_spellings import IN_HALVES
from fusec.plans.verdict import UNASKED, Refused
from fusec.schedule.program import Kind, body_of
from fusec.system.printable import printable
from fusec.targets.target import CPU


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
        f"the model's {nodes_text(len(became))} became {ops} ops, because loops are unrolled and composite ops are "
        f"written out; most come from {most_text(became, 'ops', source.remarks)}",
        grew=True,
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


def _quantised(compiled: Compiled) -> Hint | None:
    """Tell how many products of a quantised model stay in floats, with the most frequent reason."""
    floats = float_edges(compiled)
    if not floats:
        return None
    ((reason, count), *others) = Counter(edge.reason for edge in floats).most_common()
    first = next(edge for edge in floats if edge.reason == reason)
    where = listed(first.nodes or (first.value,), WIDTH)
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
