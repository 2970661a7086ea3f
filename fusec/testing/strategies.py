"""Generate op types, ops and valid graphs with Hypothesis.

Examples shrink towards small graphs of simple ops. `fusec.testing.generators.motifs` sets how often each motif occurs.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import assume
from hypothesis import strategies as st

from fusec.ir import DType, Graph, Op, TensorType
from fusec.ops import BY_NAME
from fusec.passes import names as pass_names
from fusec.testing.case import Case
from fusec.testing.generators.arrays import STYLES
from fusec.testing.generators.graph_builder import Choices, Draw, RandomGraph, Unfit
from fusec.testing.generators.motifs import MOTIFS
from fusec.testing.generators.motifs.kernels import KERNELS, MOST_ELEMENTS
from fusec.testing.generators.operations import DRAWS

FLOATS = (DType.F32, DType.F32, DType.F32, DType.F16, DType.BF16, DType.F64)
KERNEL_FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F32)
JUDGES = ("lowers", "lowers", "runtime", "moody", "moody", "anchors")
PRECISIONS = ("fp32", "fp32", "fp32", "tf32", "fp16", "fp16", "bf16")
_STYLES = ("normal", "normal", "integers", "integers", "positive", "ties", "wide", "special")
_KINDS = tuple(motif for motif, weight in MOTIFS.items() for _ in range(weight))
_DISABLED = tuple(sorted(pass_names() - {"assign_layout", "precision"}))
_ATTEMPTS = 3  # draws of a motif before a step of the graph is left out


def dtypes(floats_only: bool = False) -> st.SearchStrategy[DType]:
    """Generate element types; f32 is the simplest."""
    return st.sampled_from([d for d in (DType.F32, *DType) if d.is_float or not floats_only])


@st.composite
def shapes(draw: st.DrawFn, min_rank: int = 0, max_rank: int = 5) -> tuple[int, ...]:
    """Generate shapes of at most a few hundred elements, with dims of 1, odd dims, and rarely an empty one."""
    return RandomGraph(draw).shape(min_rank, max_rank)


@st.composite
def orders(draw: st.DrawFn, rank: int) -> tuple[int, ...]:
    """Generate memory orders of a rank: row-major, or any permutation of its dims."""
    choices = Choices(draw)
    return choices.permutation(rank) if rank > 1 and choices.chance(60) else ()


@st.composite
def tensor_types(draw: st.DrawFn, min_rank: int = 0, max_rank: int = 5) -> TensorType:
    """Generate tensor types: a shape, an element type and a memory order."""
    shape = draw(shapes(min_rank, max_rank))
    return TensorType(shape, draw(dtypes()), draw(orders(len(shape))))


@st.composite
def single_ops(draw: st.DrawFn, name: str | None = None) -> Graph:
    """Generate a graph about one op, with the nodes that make its operands valid.

    name: the op; default: any op of the registry.
    """
    name = name or draw(st.sampled_from(sorted(DRAWS)))
    builder = RandomGraph(draw, draw(st.sampled_from(FLOATS)))
    builder.input(TensorType(builder.image_shape() if builder.chance(60) else builder.shape(), builder.dtype))
    try:
        DRAWS[name](builder)
    except Unfit:
        assume(False)
    return builder.finish(0)


@st.composite
def ops(draw: st.DrawFn, name: str | None = None) -> tuple[Op, tuple[TensorType, ...]]:
    """Generate an op with its attributes, and operand types that it accepts."""
    name = name or draw(st.sampled_from(sorted(BY_NAME)))
    graph = draw(single_ops(name))
    nodes = [n for n in graph.nodes if n.op.name == name]
    assume(nodes)
    return nodes[-1].op, tuple(v.type for v in nodes[-1].operands)


@st.composite
def graphs(draw: st.DrawFn, max_steps: int = 5, dtypes: Sequence[DType] = FLOATS) -> Graph:
    """Generate a graph of up to about twenty nodes, with fan-out, diamonds, several outputs and shared constants.

    Every op of the registry occurs. Motifs that fuse, or that a partitioner may get wrong, occur more often.
    dtypes: the float types to draw from; most floats of one graph have the same type.
    """
    builder = RandomGraph(draw, draw(st.sampled_from(list(dtypes))))
    for _ in range(1 + builder.below(2)):
        shape = builder.image_shape() if builder.chance(65) else builder.shape()
        builder.input(TensorType(shape, builder.dtype, builder.order(len(shape))))
    for _ in range(1 + builder.below(max_steps)):
        _attempt(builder, _KINDS)
    return builder.finish()


@st.composite
def kernel_graphs(draw: st.DrawFn, dtypes: Sequence[DType] = KERNEL_FLOATS) -> Graph:
    """Generate a graph with a step for one of fusec's own kernels, and a few random ops after it.

    Each family of `fusec.gpu.kernels.FAMILIES` is equally likely. Random graphs reach few of these families.
    """
    builder = RandomGraph(draw, draw(st.sampled_from(list(dtypes))))
    builder.most_elements = MOST_ELEMENTS
    _attempt(builder, tuple(KERNELS.values()))
    for _ in range(builder.pick([0, 0, 1, 2])):
        _attempt(builder, _KINDS)
    return builder.finish()


def _attempt(builder: RandomGraph, kinds: Sequence[Draw]) -> None:
    """Add a motif; draw another one if it does not fit.

    The nodes that an unfit motif has added stay in the graph, because unused nodes are valid test input, too.
    """
    for _ in range(_ATTEMPTS):
        try:
            builder.pick(kinds)(builder)
            return
        except Unfit:
            continue


@st.composite
def cases(draw: st.DrawFn, judges: Sequence[str] = JUDGES, precisions: Sequence[str] = PRECISIONS) -> Case:
    """Generate cases: data, precision, disabled rules, the judge and the layout of images."""
    choices = Choices(draw)
    disable = frozenset[str]()
    if choices.chance(20):
        disable = frozenset(choices.pick(_DISABLED) for _ in range(1 + choices.below(3)))
    seed = choices.below(1 << 16)
    return Case(
        seed=seed,
        style=choices.pick(_STYLES),
        precision=choices.pick(list(precisions)),
        disable=disable,
        judge=choices.pick(list(judges)),
        channels_last=seed % 5 == 4,
    )


assert set(_STYLES) == set(STYLES)
