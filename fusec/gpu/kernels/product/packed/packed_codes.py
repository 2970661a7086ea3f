"""Tell how packed weights, their scales and zero points are stored for the kernel, and how it makes floats of them.

Weights are in tiles of 16 columns and chunks of the depth. A chunk of a tile is 512 bytes, 16 for each thread of a
warp, in the order of the operands of `mma.sync`: thread 4g + q has columns g and g + 8.
"""

from __future__ import annotations

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate
from fusec.gpu.kernels.codegen.kernel import C_TYPES
from fusec.ir import DType, Node, TensorType, Value
from fusec.ops import PackedMatMul
from fusec.system.dataclass import dataclass

DEPTH = 16  # of one product of a warp
SIGNED = (DType.I4, DType.I8)


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """The constants of a packed product.

    floats: the type that weights are multiplied in.
    block: neighbours along the depth that share a scale.
    """

    codes: Value
    scales: Value
    zeros: Value | None
    floats: DType
    block: int

    @classmethod
    def of(cls, product: Node) -> PackedCodes:
        x, codes, scales, *zeros = product.operands
        assert isinstance(product.op, PackedMatMul)
        block = min(product.op.block, codes.type.shape[1])
        return cls(codes, scales, zeros[0] if zeros else None, x.type.dtype, block)

    @property
    def type(self) -> TensorType:
        return self.codes.type

    @property
    def bits(self) -> int:
        return self.type.dtype.bits

    @property
    def depth(self) -> int:
        """The depth of a chunk."""
        return 256 // self.bits

    @property
    def products(self) -> int:
        """Products of a group, which is one load of neighbours of a row, and within one block."""
        return min(2, self.block // DEPTH)

    @property
    def count(self) -> int:
        """Neighbours of a row that a thread multiplies in a group."""
        return 4 * self.products

    def stored(self, tiles: int = 1, warps: int = 1) -> TensorType:
        """Return the type of the weights as they are stored: both dims are split, in the order of the threads.

        tiles, warps: each of `warps` warps reads a part of the depth of `tiles` tiles. It is contiguous in memory.
        """
        columns, depth = self.type.shape
        groups = self.depth // (DEPTH * self.products)
        split_columns, split_depth = (columns // (16 * tiles), tiles, 2, 8), (warps, depth // (self.depth * warps))
        shape = (*split_columns, *split_depth, groups, 4, self.products, 2, 2)
        block, tile, half, g, warp, chunk, group, q, product, later, pair = range(11)
        # pairs of 4 bits are 16 bits apart, so that one mask selects both
        inner = (pair, later, half) if self.bits == 4 else (later, half, pair)
        return TensorType(shape, self.type.dtype, (block, warp, chunk, tile, g, q, group, product, *inner))

    def by_block(self, value: Value) -> TensorType:
        """Return the type of scales or zero points as they are stored: those of columns g and g + 8 are neighbours."""
        columns, blocks = value.type.shape
        return TensorType((columns // 16, 2, 8, blocks), value.type.dtype, (0, 3, 2, 1))

    def by_chunk(self, value: Value, tiles: int) -> TensorType:
        """Return the type of scales or zero points that are stored chunk by chunk, for `tiles` tiles together.

        Where several chunks share a scale, it is stored once.
        """
        columns, blocks = value.type.shape
        each = self.blocks_of_chunk
        shape = (columns // (16 * tiles), tiles, 2, 8, blocks // each, each)
        block, tile, half, g, chunk, part = range(6)
        return TensorType(shape, value.type.dtype, (block, chunk, tile, g, part, half))

    @property
    def blocks_of_chunk(self) -> int:
        """The scales of a column in a chunk."""
        return max(1, self.depth // self.block)

    @property
    def chunks_of_block(self) -> int:
        """The chunks that share a scale."""
        return max(1, self.block // self.depth)

    def bind(self, cuda: CudaTemplate, zeros: str) -> CudaTemplate:
        """Fill in what depends on the constants, but for pointers.

        zeros: the pointer to zero points. Those of a thread begin at `place`.
        """
        by_bits = not (self.bits == 8 and self.floats is DType.BF16)  # bf16 has no 8 bits after its first one
        low = (8 if self.bits == 4 else 128) if self.type.dtype in SIGNED else 0
        return cuda.bind(
            SCALE_TYPE=C_TYPES[self.scales.type.dtype],
            BLOCKS=self.scales.type.shape[1],
            BLOCK=self.block,
            DEPTH=self.depth,
            GROUPS=self.depth // (DEPTH * self.products),
            GROUP_DEPTH=DEPTH * self.products,
            PRODUCTS=self.products,
            COUNT=self.count,
            WORDS=self.count // 2,
            OFFSET_TYPE="u32" if by_bits else "float",
            OFFSET=self._offset(low, by_bits, zeros),
            WORD=self._word(),
            LOW_BITS=(self._first + low) * 0x10001,
            HIGH_BITS=(self._first + 16 * low) * 0x10001,
            UNPACK=self._unpacked() if by_bits else self._converted(),
        )

    @property
    def _first(self) -> int:
        """The bits of a float whose last bits hold a code: 1024 in fp16, 128 in bf16."""
        return 0x6400 if self.floats is DType.F16 else 0x4300

    @property
    def _in_place(self) -> bool:
        """Tell if codes of columns g + 8 stay at bits 4 to 7, as sixteenths of 1024 + 16 code, which saves a shift."""
        return self.bits == 4 and self.floats is DType.F16

    def _offset(self, low: int, by_bits: bool, pointer: str) -> str:
        """Return what is subtracted from each weight after its bits became a float."""
        number, step = f"{(self._first + low) * 0x10001}u", "0x10001u"
        if self._in_place:  # 64 + low in fp16, whose last bit is a sixteenth
            number, step = f"(h ? {(0x5400 + 16 * low) * 0x10001}u : {number})", "(h ? 0x100010u : 0x10001u)"
        if self.zeros is None:
            return number if by_bits else "0.0f"
        zero = f"wide(load_part({pointer}, place + h))" if self.bits == 4 else f"{pointer}[place + h]"
        return f"{number} + (u32)(i32){zero} * {step}" if by_bits else f"(float){zero}"

    def _word(self) -> str:
        """Return the bits of a pair of weights: of columns g or g + 8 (i % 2), at depth 2q or 2q + 8 (i / 2)."""
        number = f"(j * {self.products} + s)"
        if self.bits == 4:
            return f"codes[u][t][{number}] >> {'8 * (i / 2)' if self._in_place else '4 * i'}"
        return f"codes[u][t][{number} * 2 + i / 2] >> 16 * (i % 2)"

    def _unpacked(self) -> str:
        kind = C_TYPES[self.floats]
        pair = "(word & 0x000f000fu)" if self.bits == 4 else "((word & 0xffu) | (word & 0xff00u) << 8)"
        plain = f"pair_less<{kind}>({pair} ^ low_bits, less)"
        if not self._in_place:
            return plain
        return f"i % 2 ? pair_sixteenth_less((word & 0x00f000f0u) ^ high_bits, less) : {plain}"

    def _converted(self) -> str:
        number = C_TYPES[self.type.dtype]
        low, high = f"(float)({number})word", f"(float)({number})(word >> 8)"
        return f"word_of<{C_TYPES[self.floats]}>({low} - less, {high} - less)"
