"""How a block of attention multiplies: by products of warps, or, on Hopper, by those of four warps.

Both have scores, weights and sums in registers in the same places: thread 4g + t of a warp has columns 2t and 2t + 1 of
each eight, in rows g and g + 8 of each sixteen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels import groups
from fusec.gpu.kernels.products import nested
from fusec.gpu.kernels.spec import C_TYPES, ceil_div
from fusec.gpu.kernels.view import View
from fusec.ir import DType

PACK = 8  # neighbours of a row that are copied at once: an octet


@dataclass(frozen=True)
class Shares:
    """Blocks of so many warps, each of which has `tiles` times 16 queries; so many keys are copied at once, and scored
    `step` at a time. `resident` blocks are to have room on a multiprocessor. grouped: four warps multiply together."""

    warps: int
    tiles: int
    keys: int
    step: int
    resident: int
    grouped: bool = False

    @property
    def queries(self) -> int:
        """Of a block."""
        return self.warps * self.tiles * 16

    @property
    def threads(self) -> int:
        return self.warps * 32


@dataclass(frozen=True)
class WarpTiles:
    """Keys and values as rows in shared memory, from which warps take tiles of 8 x 8."""

    way: Shares
    views: Sequence[View]  # of queries, keys and values

    @property
    def kind(self) -> str:
        return C_TYPES[self.views[0].dtype]

    @property
    def words(self) -> str:
        """Weights as a product takes them."""
        return "power[a][n][0], power[a][n][1], power[a][n + 1][0], power[a][n + 1][1]"

    @property
    def one(self) -> int:
        """Two numbers of one, as a word."""
        return 0x3F803F80 if self.views[0].dtype is DType.BF16 else 0x3C003C00

    def octets(self, operand: int) -> int:
        return self.views[operand].shape[3] // PACK

    @property
    def shared_bytes(self) -> int:
        """Of two rounds of keys and values."""
        return 2 * (self._size(1) + self._size(2)) * 2

    def _size(self, operand: int) -> int:
        """Elements of a round's keys, or values, in shared memory."""
        return self.way.keys * self._row(operand)

    def declared(self) -> list[str]:
        """Memory of the block, and sums of a thread. `weight` are sums of weights: of each row in each column."""
        tiles = self.way.tiles
        return [
            *self._memory(),
            f"float sums[{tiles}][{self.octets(2)}][4], weight[{tiles}][4];",
            *nested([("a", tiles), ("b", self.octets(2)), ("e", 4)], "sums[a][b][e] = 0.0f;"),
            *nested([("a", tiles), ("e", 4)], "weight[a][e] = 0.0f;"),
        ]

    def _memory(self) -> list[str]:
        return [
            "RESIDENT(kept);",
            f"{self.kind} *kept_keys = ({self.kind}*)kept, *kept_values = kept_keys + {2 * self._size(1)};",
        ]

    def preamble(self) -> list[str]:
        """What stands before the kernel."""
        return []

    def queries(self) -> list[str]:
        """The queries of a warp as fragments: words of two neighbours."""
        view = self.views[0]
        return [
            f"u32 query[{self.way.tiles}][{self.octets(0)}][2];",
            *nested(
                [("a", self.way.tiles), ("h", 2)],
                "const u32 at = first + a * 16 + h * 8;",
                f"const u32* row = (const u32*)(q + (at < {view.shape[2]}u ? at : {view.shape[2] - 1}u)"
                f" * {view.strides[2]});",
                *nested([("o", self.octets(0))], "query[a][o][h] = row[o * 4 + t];"),
            ),
        ]

    def copied(self, round: str, stage: str) -> list[str]:
        """Statements that begin to copy keys and values of a round; zeros where there are none."""
        lines: list[str] = []
        for operand, name, kept in ((1, "k", "kept_keys"), (2, "v", "kept_values")):
            view, octets, threads = self.views[operand], self.octets(operand), self.way.threads
            keys, pieces = view.shape[2], self.way.keys * octets
            lines += ["#pragma unroll", f"for (u32 i = 0; i < {ceil_div(pieces, threads)}u; ++i) {{"]
            lines.append(f"const u32 piece = threadIdx.x + i * {threads}u, own = piece / {octets}u;")
            lines.append(f"const u32 octet = piece % {octets}u, place = {self._place(operand)};")
            lines.append(f"const u32 key = {round} * {self.way.keys}u + own;")
            lines.append(f"{self.kind}* to = {kept} + ({stage} * {self._size(operand)}u + place);")
            begun = f"copy_ahead<16>(to, {name} + (key * {view.strides[2]} + octet * {PACK}u));"
            if keys % self.way.keys:
                nothing = "*(Pack<u32, 4>*)to = Pack<u32, 4>{{0u, 0u, 0u, 0u}};"
                begun = f"{{ if (key < {keys}u) {begun} else {nothing} }}"
            lines += [f"if (piece < {pieces}u) {begun}" if pieces % threads else begun, "}"]
        return [*lines, "copied();"]

    def _place(self, operand: int) -> str:
        """Of an octet of a key or value among those of a round."""
        return f"own * {self._row(operand)}u + octet * {PACK}u"

    def arrived(self) -> list[str]:
        """What a round begins with: its keys and values are there, and what the last one had is free."""
        return [
            "wait_for_copies<0>();",
            "__syncthreads();",
            f"const {self.kind}* own_keys = kept_keys + round % 2u * {self._size(1)}u;",
            f"const {self.kind}* own_values = kept_values + round % 2u * {self._size(2)}u;",
        ]

    def scored(self) -> list[str]:
        """Queries by keys: for sixteen keys at a time all their features, two octets of which are a step."""
        step, tiles, octets = self.way.step, self.way.tiles, self.octets(0)
        lines = nested([("a", tiles), ("n", step // 8), ("e", 4)], "scores[a][n][e] = 0.0f;")
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
                lines += nested([("a", tiles)], body)
            lines.append("}")
        return [*lines, "}"]

    def added(self) -> list[str]:
        """Weights by values, and by ones, which gives each thread the sums of its rows."""
        step, tiles, octets = self.way.step, self.way.tiles, self.octets(2)
        lines = ["#pragma unroll", f"for (int n = 0; n < {step // 8}; n += 2) {{"]
        lines += nested(
            [("a", tiles)], f"multiply_tile<{self.kind}>(weight[a], {self.words}, {self.one:#x}u, {self.one:#x}u);"
        )
        for o in range(0, octets, 2):
            pair = o + 1 < octets
            at = f"(s * {step} + n * 8 + lane % 16u) * {self._row(2)}u + {o * PACK}u"
            at += f" + lane / 16u * {PACK}u" if pair else ""
            lines += ["{", f"u32 value[{4 if pair else 2}];", f"load_tiles<true>(value, own_values + ({at}));"]
            for b in range(2 if pair else 1):
                taken = f"value[{2 * b}], value[{2 * b + 1}]"
                lines += nested([("a", tiles)], f"multiply_tile<{self.kind}>(sums[a][{o + b}], {self.words}, {taken});")
            lines.append("}")
        return [*lines, "}"]

    def _row(self, operand: int) -> int:
        """From one key, or value, to the next in shared memory: those of a tile lie in different banks."""
        octets = self.octets(operand)
        return (octets + 1 - octets % 2) * PACK


@dataclass(frozen=True)
class GroupTiles(WarpTiles):
    """Keys and values in tiles of 8 x 8, 128 bytes each, as four warps multiply by them out of shared memory: first all
    of one octet. Behind features lie zeros, where their octets are odd, and behind values ones."""

    @property
    def depth(self) -> int:
        """Octets of a key."""
        return self.octets(1) + self.octets(1) % 2

    @property
    def width(self) -> int:
        """Octets of a value."""
        return self.octets(2) + 1

    def _octet(self, operand: int) -> int:
        """Elements from one octet to the next."""
        return self.way.keys * PACK + groups.offset(self.octets(operand)) * PACK

    def _size(self, operand: int) -> int:
        return (self.depth if operand == 1 else self.width) * self._octet(operand)

    def _place(self, operand: int) -> str:
        return f"octet * {self._octet(operand)}u + own * {PACK}u"

    def declared(self) -> list[str]:
        keys, values, one = self._octet(1), self._octet(2), self.one & 0xFFFF
        lines = [
            *self._memory(),
            f"for (u32 i = threadIdx.x; i < {2 * self.way.keys * PACK}u; i += {self.way.threads}u) {{",
        ]
        lines.append(f"const u32 stage = i / {self.way.keys * PACK}u, own = i % {self.way.keys * PACK}u;")
        if self.depth > self.octets(1):
            lines.append(f"kept_keys[stage * {self._size(1)}u + {self.octets(1) * keys}u + own].bits = 0u;")
        lines += [f"kept_values[stage * {self._size(2)}u + {self.octets(2) * values}u + own].bits = {one:#x}u;", "}"]
        lines += [
            f"float sums[1][{self.width}][4];",
            f"float (&weight)[1][4] = *(float (*)[1][4])sums[0][{self.width - 1}];",
        ]
        return [*lines, *nested([("b", self.width), ("e", 4)], "sums[0][b][e] = 0.0f;")]

    def preamble(self) -> list[str]:
        functions = {
            (self.way.step, False): groups.product(self.kind, self.way.step),
            (self.width * 8, True): groups.product(self.kind, self.width * 8, turned=True),
        }
        return [line for lines in functions.values() for line in lines]

    def queries(self) -> list[str]:
        lines = super().queries()
        if self.depth == self.octets(0):
            return lines
        lines[0] = f"u32 query[1][{self.depth}][2];"
        return [*lines, f"query[0][{self.depth - 1}][0] = query[0][{self.depth - 1}][1] = 0u;"]

    def arrived(self) -> list[str]:
        return ["wait_for_copies<0>();", "seen_by_groups();", *super().arrived()[1:]]

    def scored(self) -> list[str]:
        step, octet = self.way.step, self._octet(1)
        lines = ["group_begins();"]
        for o in range(0, self.depth, 2):
            words = "{" + ", ".join(f"query[0][{o + i}][{h}]" for i in (0, 1) for h in (0, 1)) + "}"
            at = f"own_keys + (s * {step * PACK} + {o * octet})"
            lines += [f"{{ const u32 words[4] = {words};"]
            lines += [f"ENTRY_{step}(scores[0], words, {at}, {2 * octet}u, 128u, {int(o > 0)}); }}"]
        return [*lines, "group_ends();", "wait_for_group();", *groups.changed("scores[0]", step // 8)]

    def added(self) -> list[str]:
        step, octet, columns = self.way.step, self._octet(2), self.width * 8
        lines = ["group_begins();"]
        for n in range(0, step // 8, 2):
            words = "{" + ", ".join(f"power[0][{n + i}][{h}]" for i in (0, 1) for h in (0, 1)) + "}"
            at = f"own_values + (s * {step * PACK} + {n * 8 * PACK})"
            lines += [f"{{ const u32 words[4] = {words};"]
            lines += [f"ENTRY_{columns}_turned(sums[0], words, {at}, 128u, {2 * octet}u, 1); }}"]
        return [*lines, "group_ends();", "wait_for_group();", *groups.changed("sums[0]", self.width)]
