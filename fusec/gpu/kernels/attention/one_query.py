"""Generate attention of one query for each head, as in a decode step: its time is that of reading keys and values.

Heads that share keys and values are in one block, so each key and value is read once. Blocks share the keys. A thread
requests all of its keys and values before it computes. The last block of a group of heads adds up the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import stride_along
from fusec.ir import Node, TensorType, Value
from fusec.ops import Attention

PACK = 8  # neighbours that one load moves
FEATURES = (32, 64, 128, 256)  # a power of two of packs, at most one for each thread of a warp
MAX_SHARERS = 8  # heads of one block, whose queries are in registers
TILINGS = ((4, 16), (4, 8), (8, 8), (8, 4), (4, 4))  # warps of a block, and packs of keys and of values of a thread
_CUDA = cuda_template(__package__, "one_query.cuh")


def one_query(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of an attention of one query, with a bias or without; None for other steps."""
    if len(nodes) != 1 or not isinstance(nodes[0].op, Attention) or not _is_supported(nodes[0]):
        return None
    sources = [OneQuerySource(nodes[0], *tiling) for tiling in TILINGS]
    fit = [source for source in sources if source.shared_bytes <= figures.static_bytes]
    return with_variants(source.kernel() for source in sorted(fit, key=lambda s: s.blocks < figures.processors))


def _is_supported(node: Node) -> bool:
    op, (q, k, v), y = node.op, (operand.type for operand in node.operands[:3]), node.result.type
    assert isinstance(op, Attention)
    if op.causal or q.shape[2] != 1 or not k.shape[2] or not y.size or len({t.dtype for t in (q, k, v, y)}) > 1:
        return False
    if any(not t.dtype.is_float or t.dtype.bits < 16 for t in (operand.type for operand in node.operands[3:])):
        return False
    packed = all(_is_packed(t) for t in (q, k, v, y))
    heads_fit = q.shape[1] // k.shape[1] <= MAX_SHARERS
    return packed and heads_fit and q.dtype in HALVES and q.shape[3] == v.shape[3] and q.shape[3] in FEATURES


def _is_packed(type: TensorType) -> bool:
    """Tell if rows are contiguous, begin at multiples of a pack, and have offsets of 32 bits."""
    *outer, inner = type.strides
    moved = [stride for stride, size in zip(outer, type.shape, strict=False) if size > 1]
    return inner == 1 and not any(s % PACK or s < 0 for s in moved) and type.span < 1 << 31


@dataclass(frozen=True, eq=False)
class OneQuerySource:
    """The launch of an attention.

    warps: of a block.
    rounds: keys, and values, of which a thread holds a pack.
    """

    node: Node
    warps: int
    rounds: int

    @property
    def features(self) -> int:
        return self.node.result.type.shape[3]

    @property
    def sharers(self) -> int:
        """The heads that share keys and values."""
        return self.node.operands[0].type.shape[1] // self.node.operands[1].type.shape[1]

    @property
    def share(self) -> int:
        """The keys of a block."""
        return self.rounds * self.warps * 32 * PACK // self.features

    @property
    def parts(self) -> int:
        """The blocks that share the keys."""
        return ceil_div(self.node.operands[1].type.shape[2], self.share)

    @property
    def blocks(self) -> int:
        batch, groups = self.node.operands[1].type.shape[:2]
        return batch * groups * self.parts

    @property
    def shared_bytes(self) -> int:
        return 4 * self.sharers * (self.share + 2 + self.warps * self.features + 2 * self.parts)

    def kernel(self) -> Kernel:
        arguments, op = Arguments(), self.node.op
        assert isinstance(op, Attention)
        q, k, v, *biases = self.node.operands
        batch, groups, keys, features = k.type.shape
        results, lanes = self.sharers * features, features // PACK
        record = ceil_div(results + 2 * self.sharers, PACK) * PACK
        cuda = _CUDA.bind(
            TYPE=C_TYPES[q.type.dtype],
            SCALE=f"{op.scale!r}f",
            LANES=lanes,
            FEATURES=features,
            SHARERS=self.sharers,
            WARPS=self.warps,
            THREADS=32 * self.warps,
            ROUNDS=self.rounds,
            STEP=32 * self.warps // lanes,
            SHARE=self.share,
            PARTS=self.parts,
            GROUPS=groups,
            KEYS=keys,
            RESULTS=results,
            RECORD=record,
            HIDES=c_bool(op.hides),
            IS_GUARDED=c_bool(op.guarded),
        )
        if self.parts > 1:
            cuda = cuda.bind(SCRATCH=arguments.scratch(), DOORS=arguments.doors(batch * groups))
        pointers = zip(("QUERY", "KEY", "VALUE"), (q, k, v), strict=True)
        places = {f"{name}_POINTER": arguments.read(value) for name, value in pointers}
        bias = [
            line
            for value in biases
            for line in cuda("add_bias", BIAS=arguments.read(value), AT=_at(value.type, self.sharers))
        ]
        begin = arguments.begin()  # after all pointers are named
        y = self.node.result
        lines = cuda(
            "kernel",
            **places,
            **{f"K_{name}": k.type.strides[d] for d, name in enumerate(("IMAGE", "GROUP", "KEY"))},
            **{f"V_{name}": v.type.strides[d] for d, name in enumerate(("IMAGE", "GROUP", "KEY"))},
            **{f"Q_{name}": q.type.strides[d] for d, name in enumerate(("IMAGE", "HEAD"))},
            **{f"Y_{name}": y.type.strides[d] for d, name in enumerate(("IMAGE", "HEAD"))},
            BEGIN=begin,
            ADD_BIAS=bias,
            SHARE_SUMS=cuda("share_sums") if self.parts > 1 else [],
            ADD_UP=cuda("add_parts") if self.parts > 1 else cuda("add_warps"),
            RESULT=arguments.write(y),
        )
        launch = arguments.launch("one_query", lines, self.blocks, 32 * self.warps)
        scratch_bytes = 4 * self.blocks * record if self.parts > 1 else 0
        return Kernel("attention", (replace(launch, early=True),), scratch_bytes)


def _at(type: TensorType, sharers: int) -> str:
    """Return the place of a score's bias, which broadcasts to [images, heads, 1, keys]."""
    names = ("image", f"(group * {sharers}u + h)", "0u", "key")
    return " + ".join(f"{name} * {stride_along(type, 4, d)}u" for d, name in enumerate(names) if name != "0u")
