"""Which ops behind a product are better taken along by the norm's kernel that reads their result, by measured times:
fused with the product they may leave it slower engines, and as a step of their own they are a pass over memory. So it
is with the sums of the channels of what a convolution gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fusec.gpu.autotune.concat_choice import Prices
from fusec.gpu.autotune.step_candidates import PRODUCTS, Parts, canonical_of
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.ir import Node
from fusec.ops import BatchNormBackward, BatchNormBySums, BatchNormTrain, ChannelSums, LayerNormBackward
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program

NORMS = (BatchNormTrain, BatchNormBySums, BatchNormBackward, LayerNormBackward)
Arrange = Callable[[Mapping[str, Parts]], Program]  # the program with its steps in these forms, kernels joined


def taken_along(program: Program, forms: Mapping[str, Parts], arrange: Arrange, prices_us: Prices) -> dict[str, Parts]:
    """Forms for steps whose last op a kernel behind them should take along, by `canonical_of`.

    program: as it was partitioned; forms: what its steps have. Only steps that run as one cuDNN step are looked at, and
    each piece of work once.
    """
    sample: dict[str, Partition] = {}
    for step in program.steps:
        if step.kind is Kind.CUDNN and len(step.nodes) > 1 and _ends_apart(step):
            parts = forms.get(canonical_of(program.graph, step), (Part(0),))
            normed = any(isinstance(user.op, NORMS) for value in step.outputs for user in value.users)
            # by themselves sums are not what they are in a norm's kernel: that they were cut off is no answer
            if (len(parts) == 1 or _sums(step)) and parts[0].runs == "cudnn" and normed:
                sample.setdefault(canonical_of(program.graph, step), step)
    if not sample:
        return {}
    cut = {work: (Part(len(step.nodes) - 1), Part(1, "kernel")) for work, step in sample.items()}
    again = {work: (Part(0),) for work in sample if len(forms.get(work, ())) > 1}
    before, after = arrange({**forms, **again}), arrange({**forms, **cut})
    works, pairs = list[str](), list[tuple[list[Partition], list[Partition]]]()
    for work, step in sample.items():
        apart = steps_over(after, step.nodes)
        last = after.step_of[step.nodes[-1]]
        nodes = [node for each in apart for node in each.nodes]
        whole = steps_over(before, nodes)
        if len(last.nodes) > 1 and {n for each in whole for n in each.nodes} == set(nodes):
            works.append(work)
            pairs.append((whole, apart))
    times = iter(prices_us(program.graph, [step for pair in pairs for steps in pair for step in steps]))
    sums = [tuple(sum(next(times) for _ in steps) for steps in pair) for pair in pairs]
    faster = [work for work, (whole_us, apart_us) in zip(works, sums, strict=True) if apart_us < whole_us]
    return {work: cut[work] if work in faster else again[work] for work in works if work in faster or work in again}


def _ends_apart(step: Partition) -> bool:
    """Whether what is behind a product ends in what a norm's kernel may do."""
    last = step.nodes[-1]
    if not any(isinstance(node.op, PRODUCTS) for node in step.nodes[:-1]):
        return False
    return _sums(step) or (len(step.outputs) == 1 and can_generate(last))


def _sums(step: Partition) -> bool:
    return isinstance(step.nodes[-1].op, ChannelSums)


def steps_over(program: Program, nodes: Sequence[Node]) -> list[Partition]:
    """The steps that these nodes are in."""
    return list(dict.fromkeys(program.step_of[node] for node in nodes))
