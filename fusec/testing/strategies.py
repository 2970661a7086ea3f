"""Hypothesis strategies for everything a graph is made of, and for graphs: valid by construction.

They shrink towards small graphs of simple ops; see `fusec.testing.generators.motifs` for what they are weighted to.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import assume
from hypothesis import strategies as st

from fusec.ir import Constant, DType, Graph, Op, TensorType
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
_DISABLED = tuple(sorted(pass_names() - {"layout", "precision"}))
_ATTEMPTS = 3  # at a step whose draw does not fit


def dtypes(floats_only: bool = False) -> st.SearchStrategy[DType]:
    """Element types; f32 is the simplest."""
    return st.sampled_from([d for d in (DType.F32, *DType) if d.is_float or not floats_only])


@st.composite
def shapes(draw: st.DrawFn, min_rank: int = 0, max_rank: int = 5) -> tuple[int, ...]:
    """Shapes of at most a few hundred elements: dims of 1, odd ones, and seldom an empty one."""
    return RandomGraph(draw).shape(min_rank, max_rank)


@st.composite
def orders(draw: st.DrawFn, rank: int) -> tuple[int, ...]:
    """Memory orders of a rank: row-major, or any permutation of its dims."""
    choices = Choices(draw)
    return choices.permutation(rank) if rank > 1 and choices.chance(60) else ()


@st.composite
def tensor_types(draw: st.DrawFn, min_rank: int = 0, max_rank: int = 5) -> TensorType:
    """A shape, an element type and a memory order."""
    shape = draw(shapes(min_rank, max_rank))
    return TensorType(shape, draw(dtypes()), draw(orders(len(shape))))


@st.composite
def single_ops(draw: st.DrawFn, name: str | None = None) -> Graph:
    """A graph about one op: `name`, or any of the registry. What makes its operands valid comes with it."""
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
    """An op with its attributes, and types of operands that it takes."""
    name = name or draw(st.sampled_from(sorted(BY_NAME)))
    graph = draw(single_ops(name))
    nodes = [n for n in graph.nodes if n.op.name == name]
    assume(nodes)
    return nodes[-1].op, tuple(v.type for v in nodes[-1].operands)


@st.composite
def graphs(draw: st.DrawFn, max_steps: int = 5, dtypes: Sequence[DType] = FLOATS) -> Graph:
    """A graph of up to about twenty nodes: DAGs with fan-out, diamonds, several outputs and shared constants.

    Every op of the registry occurs; what fuses, and what tempts a partitioner to err, occurs more often.
    The floats of one graph are mostly of one dtype, drawn from `dtypes`.
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
    """A graph with a step for one of fusec's own kernels, and a few random ops after it.

    Each family of `fusec.gpu.kernels.FAMILIES` is as likely as another; random graphs reach few of them.
    """
    builder = RandomGraph(draw, draw(st.sampled_from(list(dtypes))))
    builder.most_elements = MOST_ELEMENTS
    _attempt(builder, tuple(KERNELS.values()))
    for _ in range(builder.pick([0, 0, 1, 2])):
        _attempt(builder, _KINDS)
    return builder.finish()


def _attempt(builder: RandomGraph, kinds: Sequence[Draw]) -> None:
    """Draw a motif; what one that does not fit has added by then stays: a dead end is a graph too."""
    for _ in range(_ATTEMPTS):
        try:
            builder.pick(kinds)(builder)
            return
        except Unfit:
            continue


@st.composite
def cases(draw: st.DrawFn, judges: Sequence[str] = JUDGES, precisions: Sequence[str] = PRECISIONS) -> Case:
    """What a property depends on beside the graph: data, precision, disabled rules, who judges, how images lie."""
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


def computing(graph: Graph) -> int:
    """How many nodes a graph has, constants left out."""
    return sum(not isinstance(n.op, Constant) for n in graph.nodes)


assert set(_STYLES) == set(STYLES)
