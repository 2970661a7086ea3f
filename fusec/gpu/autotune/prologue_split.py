"""Which ops in front of a product are better done by the kernel that makes what they read, by measured times: fused
with the product they cost it its fastest engines, and that kernel what it could do on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.gpu.autotune.concat_choice import Prices
from fusec.gpu.autotune.epilogue_split import Arrange, steps_over
from fusec.gpu.autotune.step_candidates import PRODUCTS, Parts, canonical_of
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program


def given_back(program: Program, forms: Mapping[str, Parts], arrange: Arrange, prices_us: Prices) -> dict[str, Parts]:
    """Forms for steps whose first ops a kernel in front of them should do, by `canonical_of`.

    program: as it was partitioned; forms: what its steps have. Only steps that run as one cuDNN step are looked at, and
    each piece of work once.
    """
    sample: dict[str, tuple[Partition, int]] = {}
    for step in program.steps:
        front = _front(step) if step.kind is Kind.CUDNN else 0
        if front:
            parts = forms.get(canonical_of(program.graph, step), (Part(0),))
            if len(parts) == 1 and parts[0].runs == "cudnn":
                sample.setdefault(canonical_of(program.graph, step), (step, front))
    if not sample:
        return {}
    cut = {
        work: (Part(front, Kind.KERNEL.value), Part(len(step.nodes) - front)) for work, (step, front) in sample.items()
    }
    before, after = arrange(forms), arrange({**forms, **cut})
    works, pairs = list[str](), list[tuple[list[Partition], list[Partition]]]()
    for work, (step, front) in sample.items():
        apart = steps_over(after, step.nodes)
        nodes = [node for each in apart for node in each.nodes]
        whole = steps_over(before, nodes)
        if len(apart[0].nodes) > front and {n for each in whole for n in each.nodes} == set(nodes):
            works.append(work)
            pairs.append((whole, apart))
    times = iter(prices_us(program.graph, [step for pair in pairs for steps in pair for step in steps]))
    sums = [tuple(sum(next(times) for _ in steps) for steps in pair) for pair in pairs]
    return {work: cut[work] for work, (whole_us, apart_us) in zip(works, sums, strict=True) if apart_us < whole_us}


def _front(step: Partition) -> int:
    """How many pointwise ops stand before the only product; 0 if there is another."""
    products: Sequence[int] = [i for i, node in enumerate(step.nodes) if isinstance(node.op, PRODUCTS)]
    if len(products) != 1 or not all(can_generate(node) for node in step.nodes[: products[0]]):
        return 0
    return products[0]
