"""Generate the products of attention by single warps.

Scores, weights and sums are in registers: thread 4g + t of a warp has columns 2t and 2t + 1 of each eight columns, in
rows g and g + 8 of each sixteen rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.kernel import C_TYPES, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import unrolled_loops
from fusec.ir import DType

PACK = 8  # neighbours of a row that one copy moves: an octet


@dataclass(frozen=True)
class AttentionTiling:
    """Shares of an attention: blocks, warps, queries and keys.

    warps: warps of a block.
    tiles: each warp has 16 times so many queries.
    keys: keys that are copied together.
    step: keys that are scored together.
    resident: blocks that a multiprocessor must have room for.
    grouped: four warps multiply together (Hopper).
    """

    warps: int
    tiles: int
    keys: int
    step: int
    resident: int
    grouped: bool = False

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.warps * self.tiles * 16

    @property
    def threads(self) -> int:
        return self.warps * 32


@dataclass(frozen=True)
class WarpTiles:
    """Keys and values as rows in shared memory, from which warps load tiles of 8 x 8.

    views: of queries, keys and values.
    """

    tiling: AttentionTiling
    views: Sequence[View]

    @property
    def kind(self) -> str:
        return C_TYPES[self.views[0].dtype]

    @property
    def weight(self) -> str:
        """The sums of weights of a tile; each column has the sum of its row."""
        return "weight[a]"

    @property
    def words(self) -> str:
        """Weights as a product takes them."""
        return "power[a][n][0], power[a][n][1], power[a][n + 1][0], power[a][n + 1][1]"

    @property
    def one(self) -> int:
        """Two ones, as a word."""
        return 0x3F803F80 if self.views[0].dtype is DType.BF16 else 0x3C003C00

    def octets(self, operand: int) -> int:
        return self.views[operand].shape[3] // PACK

    @property
    def shared_bytes(self) -> int:
        """Bytes for two rounds of keys and values."""
        return 2 * (self._size(1) + self._size(2)) * 2

    def _size(self, operand: int) -> int:
        """Return the elements of a round's keys, or values, in shared memory."""
        return self.tiling.keys * self._row(operand)

    def declare(self) -> list[str]:
        """Declare shared memory, and the sums of a thread."""
        tiles = self.tiling.tiles
        return [
            *self._memory(),
            f"float sums[{tiles}][{self.octets(2)}][4], weight[{tiles}][4];",
            *unrolled_loops([("a", tiles), ("b", self.octets(2)), ("e", 4)], "sums[a][b][e] = 0.0f;"),
            *unrolled_loops([("a", tiles), ("e", 4)], "weight[a][e] = 0.0f;"),
        ]

    def _memory(self) -> list[str]:
        return [
            "RESIDENT(kept);",
            f"{self.kind} *kept_keys = ({self.kind}*)kept, *kept_values = kept_keys + {2 * self._size(1)};",
        ]

    def preamble(self) -> list[str]:
        """Return the lines before the kernel."""
        return []

    def queries(self) -> list[str]:
        """Load the queries of a warp as fragments: words of two neighbours."""
        view = self.views[0]
        return [
            f"u32 query[{self.tiling.tiles}][{self.octets(0)}][2];",
            *unrolled_loops(
                [("a", self.tiling.tiles), ("h", 2)],
                "const u32 at = first + a * 16 + h * 8;",
                f"const u32* row = (const u32*)(q + (at < {view.shape[2]}u ? at : {view.shape[2] - 1}u)"
                f" * {view.strides[2]});",
                *unrolled_loops([("o", self.octets(0))], "query[a][o][h] = row[o * 4 + t];"),
            ),
        ]

    def copy_round(self, round: str, stage: str) -> list[str]:
        """Begin to copy keys and values of a round; past the end, store zeros."""
        lines: list[str] = []
        for operand, name, kept in ((1, "k", "kept_keys"), (2, "v", "kept_values")):
            view, octets, threads = self.views[operand], self.octets(operand), self.tiling.threads
            keys, pieces = view.shape[2], self.tiling.keys * octets
            lines += ["#pragma unroll", f"for (u32 i = 0; i < {ceil_div(pieces, threads)}u; ++i) {{"]
            lines.append(f"const u32 piece = threadIdx.x + i * {threads}u, own = piece / {octets}u;")
            lines.append(f"const u32 octet = piece % {octets}u, place = {self._place(operand)};")
            lines.append(f"const u32 key = {round} * {self.tiling.keys}u + own;")
            lines.append(f"{self.kind}* to = {kept} + ({stage} * {self._size(operand)}u + place);")
            begun = f"copy_ahead<16>(to, {name} + (key * {view.strides[2]} + octet * {PACK}u));"
            if keys % self.tiling.keys:
                nothing = "*(Pack<u32, 4>*)to = Pack<u32, 4>{{0u, 0u, 0u, 0u}};"
                begun = f"{{ if (key < {keys}u) {begun} else {nothing} }}"
            lines += [f"if (piece < {pieces}u) {begun}" if pieces % threads else begun, "}"]
        return [*lines, "copied();"]

    def _place(self, operand: int) -> str:
        """Return the place of an octet of a key, or value, within its round."""
        return f"own * {self._row(operand)}u + octet * {PACK}u"

    def await_round(self) -> list[str]:
        """Wait until a round's keys and values are copied and the last round's are no longer read."""
        return [
            "wait_for_copies<0>();",
            "__syncthreads();",
            f"const {self.kind}* own_keys = kept_keys + round % 2u * {self._size(1)}u;",
            f"const {self.kind}* own_values = kept_values + round % 2u * {self._size(2)}u;",
        ]

    def loop_over_rounds(self, weigh: list[str]) -> list[str]:
        """Loop over all rounds.

        weighed: the statements that turn scores into weights.
        """
        step, tiles = self.tiling.step, self.tiling.tiles
        return [
            *self.copy_round("0", "0"),
            *("bool fresh = true;", "#pragma unroll 1", "for (u32 round = 0; round < rounds; ++round) {"),
            *(*self.await_round(), "if (round + 1u < rounds) {"),
            *(*self.copy_round("(round + 1u)", "((round + 1u) % 2u)"), "}"),
            *("#pragma unroll", f"for (int s = 0; s < {self.tiling.keys // step}; ++s) {{"),
            *(f"float scores[{tiles}][{step // 8}][4];", *self.score(), *weigh, *self.accumulate(), "}", "}"),
        ]

    def score(self) -> list[str]:
        """Multiply queries by sixteen keys at a time, two octets of features in each product."""
        step, tiles, octets = self.tiling.step, self.tiling.tiles, self.octets(0)
        lines = unrolled_loops([("a", tiles), ("n", step // 8), ("e", 4)], "scores[a][n][e] = 0.0f;")
        lines += ["#pragma unroll", f"for (int n = 0; n < {step // 8}; n += 2) {{"]
        for o in range(0, octets, 2):
            pair = o + 1 < octets
            # octets o and o + 1 of keys 0-7, then of keys 8-15
            own, octet = ("lane / 16u * 8u + lane % 8u", f" + lane / 8u % 2u * {PACK}u") if pair else ("lane % 16u", "")
            at = f"(s * {step} + n * 8 + {own}) * {self._row(1)}u + {o * PACK}u{octet}"
            lines += ["{", f"u32 key[{4 if pair else 2}];", f"load_tiles<false>(key, own_keys + ({at}));"]
            for n in range(2):
                words = f"scores[a][n + {n}], query[a][{o}][0], query[a][{o}][1]"
                if pair:
                    words += f", query[a][{o + 1}][0], query[a][{o + 1}][1], key[{2 * n}], key[{2 * n + 1}]"
                    body = f"multiply_tile<{self.kind}>({words});"
                else:
                    body = f"multiply_half_tile<{self.kind}>({words}, key[{n}]);"
                lines += unrolled_loops([("a", tiles)], body)
            lines.append("}")
        return [*lines, "}"]

    def accumulate(self) -> list[str]:
        """Multiply weights by values, and by ones, which gives each thread the sums of its rows."""
        step, tiles, octets = self.tiling.step, self.tiling.tiles, self.octets(2)
        lines = ["#pragma unroll", f"for (int n = 0; n < {step // 8}; n += 2) {{"]
        lines += unrolled_loops(
            [("a", tiles)], f"multiply_tile<{self.kind}>(weight[a], {self.words}, {self.one:#x}u, {self.one:#x}u);"
        )
        for o in range(0, octets, 2):
            pair = o + 1 < octets
            at = f"(s * {step} + n * 8 + lane % 16u) * {self._row(2)}u + {o * PACK}u"
            at += f" + lane / 16u * {PACK}u" if pair else ""
            lines += ["{", f"u32 value[{4 if pair else 2}];", f"load_tiles<true>(value, own_values + ({at}));"]
            for b in range(2 if pair else 1):
                taken = f"value[{2 * b}], value[{2 * b + 1}]"
                lines += unrolled_loops(
                    [("a", tiles)], f"multiply_tile<{self.kind}>(sums[a][{o + b}], {self.words}, {taken});"
                )
            lines.append("}")
        return [*lines, "}"]

    def _row(self, operand: int) -> int:
        """Return the distance of keys, or values, in shared memory. An odd number of octets avoids bank conflicts."""
        octets = self.octets(operand)
        return (octets + 1 - octets % 2) * PACK
