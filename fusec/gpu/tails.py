"""Which ops behind a product are better taken along by the norm's kernel that reads their result, by measured times:
fused with the product they may leave it slower engines, and as a step of their own they are a pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fusec.gpu.forms import PRODUCTS, Parts, canonical_of
from fusec.gpu.joins import Prices
from fusec.gpu.kernels.chain import takes
from fusec.ir import Node
from fusec.ops import BatchNormBackward, BatchNormTrain, LayerNormBackward
from fusec.plans import Part
from fusec.program import Kind, Partition, Program

NORMS = (BatchNormTrain, BatchNormBackward, LayerNormBackward)
Arrange = Callable[[Mapping[str, Parts]], Program]  # the program with its steps in these forms, kernels joined


def taken_along(program: Program, forms: Mapping[str, Parts], arrange: Arrange, prices_us: Prices) -> dict[str, Parts]:
    """Forms for steps whose last op a kernel behind them should take along, by `canonical_of`.

    program: as it was partitioned; forms: what its steps have. Only steps that run as one cuDNN step are looked at, and
    each piece of work once.
    """
    sample: dict[str, Partition] = {}
    for step in program.steps:
        if step.kind is Kind.CUDNN and len(step.nodes) > 1 and len(step.outputs) == 1 and _ends_in_pointwise(step):
            parts = forms.get(canonical_of(program.graph, step), (Part(0),))
            normed = any(isinstance(user.op, NORMS) for value in step.outputs for user in value.users)
            if len(parts) == 1 and parts[0].runs == "cudnn" and normed:
                sample.setdefault(canonical_of(program.graph, step), step)
    if not sample:
        return {}
    cut = {work: (Part(len(step.nodes) - 1), Part(1, "kernel")) for work, step in sample.items()}
    before, after = arrange(forms), arrange({**forms, **cut})
    works, pairs = list[str](), list[tuple[list[Partition], list[Partition]]]()
    for work, step in sample.items():
        apart = _over(after, step.nodes)
        last = after.step_of[step.nodes[-1]]
        nodes = [node for each in apart for node in each.nodes]
        whole = _over(before, nodes)
        if len(last.nodes) > 1 and {n for each in whole for n in each.nodes} == set(nodes):
            works.append(work)
            pairs.append((whole, apart))
    times = iter(prices_us(program.graph, [step for pair in pairs for steps in pair for step in steps]))
    sums = [tuple(sum(next(times) for _ in steps) for steps in pair) for pair in pairs]
    return {work: cut[work] for work, (whole_us, apart_us) in zip(works, sums, strict=True) if apart_us < whole_us}


def _ends_in_pointwise(step: Partition) -> bool:
    return any(isinstance(node.op, PRODUCTS) for node in step.nodes[:-1]) and takes(step.nodes[-1])


def _over(program: Program, nodes: Sequence[Node]) -> list[Partition]:
    """The steps that these nodes are in."""
    return list(dict.fromkeys(program.step_of[node] for node in nodes))
