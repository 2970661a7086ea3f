"""List what could run a step: cuDNN in several spellings, a kernel, or several smaller steps.

All of them compute the same as the step that the partitioner's cost model proposes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fusec.gpu.autotune.fusion.fusion_proposals import is_rounded, rounded_at
from fusec.gpu.autotune.step_choices import has_candidates, kernel_of, products_first
from fusec.gpu.kernels import GpuFigures
from fusec.gpu.kernels.attention.cached.match_cached import is_cached_attention, parts_of_cached
from fusec.gpu.kernels.product.integer_product import uses_no_tensor_cores
from fusec.gpu.kernels.product.row_norm import MAX_STREAMED, begins_few_rows
from fusec.ir import BYTES, Graph, Node
from fusec.ops import FORWARD_CONVOLUTIONS, PRODUCTS, ChannelSums, MatMul, PackedMatMul, Pointwise, Reduce
from fusec.ops.matmul import SUMMED_IN
from fusec.passes.partition.cost_model import flops, is_depthwise, is_fast
from fusec.passes.partition.equivalent_spellings import IN_HALVES, UNPACKED, faster_spellings, spelled, spellings
from fusec.schedule.aliasing import is_view
from fusec.schedule.program import Kind, Partition, body_of, single_step

SLOW_FLOPS = 1 << 27  # of a product; above it, a kernel without tensor cores is not timed
HALVES_FLOPS = 1 << 30  # of a product; above it, another engine multiplies 8-bit numbers faster than in fp16
_SCALES = ("cast", "mul")  # ops that scale the sums of a product of 8-bit numbers

Candidate = tuple[Partition, ...]  # steps that replace one step, in order


def candidates(graph: Graph, step: Partition, level: str, figures: GpuFigures) -> list[Candidate]:
    """List the candidates of a step that are worth timing; the step as it is comes first.

    Level `none` adds nothing. Level `quick` adds spellings, a kernel, and, where fused engines are known to be slow,
    splits into two steps. Level `full` adds every split.

    figures: figures of the GPU, which shape kernels.
    """
    found: list[Candidate] = [(step,)]
    if level == "none" or not has_candidates(step):
        return found
    if step.kind is Kind.KERNEL and isinstance(step.nodes[0].op, PackedMatMul):
        return [*found, *_unpacked(graph, step.nodes, figures), *_packed_apart(graph, step.nodes, figures)]
    if step.kind is Kind.KERNEL:
        return [*found, *_unfused(graph, step.nodes, level, figures)]
    found += [(other,) for other in _spelled(graph, step.nodes) if other.spelling != step.spelling]
    kernels = (
        [] if level == "quick" and _is_slow_as_kernel(step, figures) else list(_kernel(graph, step.nodes, figures))
    )
    for names, body in faster_spellings(body_of(graph, step.nodes)):
        if level == "full" or IN_HALVES not in names or _may_win_in_halves(step, bool(kernels)):
            found.append((Partition(step.nodes, Kind.CUDNN, body, names),))
    found += [(whole,) for whole in kernels]
    if level == "full" or _slow_when_fused(step):
        for first, second in _splits(products_first(step.nodes)):
            starts = _as_part(graph, first, level, figures) if _pointwise(first) else list(_spelled(graph, first))
            if not any(isinstance(node.op, MatMul) for node in first) and not _pointwise(first):
                starts = starts[:1]
            found += [(start, rest) for start in starts for rest in _as_part(graph, second, level, figures)]
        found += _two_products(graph, products_first(step.nodes), figures)
    if isinstance(step.nodes[-1].op, ChannelSums):
        starts = _spelled(graph, step.nodes[:-1])
        found += [(start, kernel) for start in starts for kernel in _kernel(graph, step.nodes[-1:], figures)]
    return found


def _is_slow_as_kernel(step: Partition, figures: GpuFigures) -> bool:
    """Tell if the kernel of a large product of integers uses no tensor cores, so that even timing it takes long."""
    if not any(isinstance(node.op, MatMul) and node.result.type.dtype.is_int for node in step.nodes):
        return False
    return uses_no_tensor_cores(kernel_of(step.nodes, figures)) and sum(map(flops, step.nodes)) > SLOW_FLOPS


def _may_win_in_halves(step: Partition, has_kernel: bool) -> bool:
    """Tell if a product of 8-bit numbers is worth timing in fp16, because such plans take long to build.

    No other convolution of ResNet-50 and MobileNetV2 was faster in fp16 on an H200, and no large matmul of BERT-base.
    """
    products = [node for node in step.nodes if isinstance(node.op, PRODUCTS)]
    is_small = sum(map(flops, products)) <= HALVES_FLOPS
    if any(isinstance(node.op, FORWARD_CONVOLUTIONS) for node in products):
        is_pixelwise = all(math.prod(node.operands[1].type.shape[2:]) == 1 for node in products)
        return is_pixelwise and is_small and not has_kernel
    return is_small or not (has_kernel or any(node.operands[0].type.dtype not in BYTES for node in products))


def _two_products(graph: Graph, nodes: Sequence[Node], figures: GpuFigures) -> Iterator[Candidate]:
    """Yield two products as steps of their own, in the same spelling, and a kernel for the rest."""
    rest = nodes[2:]
    if not rest or not all(isinstance(node.op, PRODUCTS) for node in nodes[:2]) or not _pointwise(rest):
        return
    for kernel in _kernel(graph, rest, figures):
        for first, second in zip(_spelled(graph, nodes[:1]), _spelled(graph, nodes[1:2]), strict=False):
            yield (first, second, kernel)


def _unfused(graph: Graph, nodes: Sequence[Node], level: str, figures: GpuFigures) -> Iterator[Candidate]:
    """Yield sequences of smaller steps for a kernel that runs several steps.

    Such a kernel runs one of six: pointwise ops and a product; a norm of few rows and products of its result; a norm
    (or attention) and the rounding of its result; writes into a cache and attention that reads it; a depthwise
    convolution with a mean and perhaps more products; a sequence of small products.
    """
    if is_cached_attention(nodes):
        yield from _cached_apart(graph, nodes, level, figures)
        return
    if begins_few_rows(nodes, MAX_STREAMED):
        is_packed = any(isinstance(node.op, PackedMatMul) for node in nodes)
        for rest in _kernel(graph, nodes[1:], figures) if is_packed else [next(_spelled(graph, nodes[1:]))]:
            for norm in _as_one_step(graph, nodes[:1], figures):
                yield from ((norm, *others) for others in candidates(graph, rest, level, figures))
        return
    if is_rounded(nodes):
        at = rounded_at(nodes)
        assert at is not None
        for first in _as_one_step(graph, nodes[: at + 1], figures):
            yield from ((first, rounding) for rounding in _kernel(graph, nodes[at + 1 :], figures))
        return
    products = [i for i, node in enumerate(nodes) if isinstance(node.op, PRODUCTS)]
    if len(products) == 1 and products[0]:
        at = products[0]
        for first in _as_part(graph, nodes[:at], level, figures):
            yield from ((first, *rest) for rest in candidates(graph, next(_spelled(graph, nodes[at:])), level, figures))
        return
    at = next((i + 1 for i, node in enumerate(nodes) if isinstance(node.op, Reduce)), 0)
    begin, tail = nodes[:at], nodes[at:]
    if begin and tail and level != "full":
        # A depthwise convolution with a squeeze-and-excitation. Its parts would launch more and read the convolution's
        # result once more, and they are 129 of 307 sources of EfficientNet-B0, which a compilation would wait for.
        return
    if begin:
        # Neither cuDNN's fused depthwise engines nor its small products are timed, because the first are known to be
        # slow, and the second are mostly launch time. A convolution whose pointwise ops run in the next step writes and
        # reads more, so that only `full` times it.
        apart = [(a, b) for a in _kernel(graph, begin[:-1], figures) for b in _kernel(graph, begin[-1:], figures)]
        first = apart if at > 2 else []
        if level == "full" or not first:
            rest = _kernel(graph, begin[1:], figures)
            first = [*((a, b) for b in rest for a in _as_one_step(graph, begin[:1], figures)), *first]
        ends: list[Candidate] = [(kernel,) for kernel in _kernel(graph, tail, figures)] if tail else [()]
        yield from ((*start, *end) for start in first for end in ends)
        return
    found: list[Candidate] = [()]
    for number, (start, end) in enumerate(zip(products, [*products[1:], len(tail)], strict=True)):
        low, high = start if number else 0, start + 1
        options: list[Candidate] = [(step,) for step in _as_one_step(graph, tail[low:end], figures)]
        if high < end:
            options += [
                (a, b)
                for a in _as_one_step(graph, tail[low:high], figures)
                for b in _kernel(graph, tail[high:end], figures)
            ]
        found = [(*steps, *more) for steps in found for more in options]
    yield from found


def _cached_apart(graph: Graph, nodes: Sequence[Node], level: str, figures: GpuFigures) -> Iterator[Candidate]:
    """Yield writes into a cache as a kernel, and the attention that reads it as each of its own candidates."""
    writing, views, attention = parts_of_cached(nodes)
    for first in _kernel(graph, writing, figures):
        for rest in candidates(graph, next(_spelled(graph, attention)), level, figures):
            yield (first, *(single_step(graph, node) for node in views), *rest)


def _unpacked(graph: Graph, nodes: Sequence[Node], figures: GpuFigures) -> Iterator[Candidate]:
    """Yield a product with packed weights as a product of floats, with the ops after it in its step or in a kernel."""
    for first, rest in [(nodes, ()), (nodes[:1], nodes[1:])][: len(nodes)]:
        body = spelled(body_of(graph, first), UNPACKED)
        for more, changed in spellings(body) if body is not None else ():
            step = Partition(tuple(first), Kind.CUDNN, changed, (UNPACKED, *more))
            yield from ((step, kernel) for kernel in _kernel(graph, rest, figures)) if rest else [(step,)]


def _packed_apart(graph: Graph, nodes: Sequence[Node], figures: GpuFigures) -> Iterator[Candidate]:
    """Yield two products with packed weights as two kernels, the second with the ops after it."""
    if sum(isinstance(node.op, PackedMatMul) for node in nodes) > 1:
        for first in _kernel(graph, nodes[:1], figures):
            yield from ((first, second) for second in _kernel(graph, nodes[1:], figures))


def _as_part(graph: Graph, nodes: Sequence[Node], level: str, figures: GpuFigures) -> list[Partition]:
    """List the nodes as one cuDNN step and as one kernel. Pointwise ops run as a kernel, unless every split is timed.

    A kernel of pointwise ops is bound by memory, as cuDNN's is, and cuDNN's takes long to build.
    """
    found = list(_as_one_step(graph, nodes, figures))
    return found[1:] if level != "full" and _pointwise(nodes) and len(found) > 1 else found


def _as_one_step(graph: Graph, nodes: Sequence[Node], figures: GpuFigures) -> Iterator[Partition]:
    """Yield the nodes as one cuDNN step, then as one kernel."""
    yield next(_spelled(graph, nodes))
    yield from _kernel(graph, nodes, figures)


def _kernel(graph: Graph, nodes: Sequence[Node], figures: GpuFigures) -> Iterator[Partition]:
    """Yield the nodes as one kernel, if one runs them."""
    if kernel_of(nodes, figures) is not None:
        yield Partition(tuple(nodes), Kind.KERNEL, body_of(graph, nodes))


def _spelled(graph: Graph, nodes: Sequence[Node]) -> Iterator[Partition]:
    """Yield the nodes as a cuDNN step in each of their spellings."""
    for names, body in spellings(body_of(graph, nodes)):
        yield Partition(tuple(nodes), Kind.CUDNN, body, names)


def _slow_when_fused(step: Partition) -> bool:
    depthwise = any(is_depthwise(node) for node in step.nodes)
    return depthwise or (step.verdict is not None and not is_fast(step.verdict))


def _splits(nodes: tuple[Node, ...]) -> Iterator[tuple[tuple[Node, ...], tuple[Node, ...]]]:
    """Yield the splits of a step in two that are worth timing.

    A step with two products is split between them. Otherwise pointwise ops are split off before the product, after it,
    or after the first add after it. Engines run such an add, a bias or residual, best. Before it is the scale of a
    product of 8-bit numbers. The first nodes of a step always make a step, because a step is convex and in graph order.
    """
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, PRODUCTS)), None)
    if at is None:
        return
    second = next((i for i, node in enumerate(nodes[at + 1 :], at + 1) if isinstance(node.op, PRODUCTS)), None)
    if second is not None:
        yield nodes[:second], nodes[second:]
        return
    if at and _pointwise(nodes[:at]):
        yield nodes[:at], nodes[at:]
    places, after = [at + 1], at + 1
    while nodes[at].operands[0].type.dtype in SUMMED_IN and after < len(nodes) and nodes[after].op.name in _SCALES:
        after += 1
    if after < len(nodes) and nodes[after].op.name == "add":
        places.append(after + 1)
    for place in places:
        if nodes[place:] and _pointwise(nodes[place:]):
            yield nodes[:place], nodes[place:]


def _pointwise(nodes: Sequence[Node]) -> bool:
    return all(isinstance(node.op, Pointwise) and not is_view(node) for node in nodes)
