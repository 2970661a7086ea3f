"""Generate the products of attention by warpgroups on Hopper, while other warps compute exponentials.

Registers hold scores, weights and sums as products of warps do.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.gpu.kernels.attention.mma_source import PACK, WarpTiles
from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.mma_tiles import unrolled_loops

STAGES = 5  # rounds whose keys and values are in shared memory


@dataclass(frozen=True)
class GroupTiles(WarpTiles):
    """Keys and values in shared memory as tiles of 8 x 8, 128 bytes each, which warpgroups multiply by.

    All tiles of one octet come first. An odd number of octets of a key is padded with zeros. Values are followed by
    ones.

    A warpgroup has 64 queries. It issues the products of its next scores and of its sums together, and waits for both.
    It
    does not wait for other warps, except for the copies of the next round's keys and values. Shared memory holds five
    rounds, because copies for two rounds later must touch none that is still read.
    """

    @property
    def weight(self) -> str:
        return f"sums[a][{self.width - 1}]"

    @property
    def depth(self) -> int:
        """Octets of a key, padded to an even number."""
        return self.octets(1) + self.octets(1) % 2

    @property
    def width(self) -> int:
        """Octets of a value, and one of ones."""
        return self.octets(2) + 1

    @property
    def shared_bytes(self) -> int:
        """Bytes for rounds of keys and values, and for a barrier."""
        return self._barrier + 16

    @property
    def _barrier(self) -> int:
        return STAGES * (self._size(1) + self._size(2)) * 2

    def _octet(self, operand: int) -> int:
        """Return the elements from one octet to the next."""
        return self.tiling.keys * PACK + wgmma.offset(self.octets(operand)) * PACK

    def _size(self, operand: int) -> int:
        return (self.depth if operand == 1 else self.width) * self._octet(operand)

    def declare(self) -> list[str]:
        keys, sizes = self.tiling.keys, (self._size(1), self._size(2))
        places = [(f"kept_values + stage * {sizes[1]}u", 2, self.one)]
        if self.depth > self.octets(1):
            places.append((f"kept_keys + stage * {sizes[0]}u", 1, 0))
        lines = [
            "RESIDENT(kept);",
            f"{self.kind} *kept_keys = ({self.kind}*)kept, *kept_values = kept_keys + {STAGES * sizes[0]};",
            f"u64* come = (u64*)(kept + {self._barrier});",
            *(f"barrier_for(come, {self.tiling.warps}u);", "__syncthreads();"),
            f"for (u32 i = threadIdx.x; i < {STAGES * keys}u; i += {self.tiling.threads}u) {{",
            f"const u32 stage = i / {keys}u, own = i % {keys}u;",
        ]
        for stage, operand, word in places:
            at = f"{stage} + {self.octets(operand) * self._octet(operand)}u + own * {PACK}u"
            lines.append(f"*(Pack<u32, 4>*)({at}) = Pack<u32, 4>{{{', '.join([f'{word:#x}u'] * 4)}}};")
        lines += ["}", f"float sums[1][{self.width}][4];"]
        return [*lines, *unrolled_loops([("b", self.width), ("e", 4)], "sums[0][b][e] = 0.0f;")]

    def preamble(self) -> list[str]:
        functions = {
            (self.tiling.step, False): wgmma.product(self.kind, self.tiling.step),
            (self.width * 8, True): wgmma.product(self.kind, self.width * 8, turned=True),
        }
        return [line for lines in functions.values() for line in lines]

    def queries(self) -> list[str]:
        lines = super().queries()
        if self.depth == self.octets(0):
            return lines
        lines[0] = f"u32 query[1][{self.depth}][2];"
        return [*lines, f"query[0][{self.depth - 1}][0] = query[0][{self.depth - 1}][1] = 0u;"]

    def _pieces(self) -> list[str]:
        """Declare where a thread reads the first octet that it copies of a round, and where it stores it."""
        lines: list[str] = []
        for operand, name in ((1, "k"), (2, "v")):
            octets, stride = self.octets(operand), self.views[operand].strides[2]
            lines.append(f"const u32 {name}_own = threadIdx.x / {octets}u, {name}_octet = threadIdx.x % {octets}u;")
            at = f"{name}_own * {stride}u + {name}_octet * {PACK}u"
            lines.append(f"const {self.kind}* {name}_from = {name} + ({at});")
            place = f"{name}_octet * {self._octet(operand)}u + {name}_own * {PACK}u"
            lines.append(f"const u32 {name}_place = {place};")
        return lines

    def copy_round(self, round: str, stage: str) -> list[str]:
        lines: list[str] = []
        for operand, name, kept in ((1, "k", "kept_keys"), (2, "v", "kept_values")):
            view, keys, octets = self.views[operand], self.tiling.keys, self.octets(operand)
            lines.append(f"{{ const {self.kind}* from = {name}_from + (u64){round} * {keys * view.strides[2]}u;")
            lines.append(f"{self.kind}* to = {kept} + ({stage} * {self._size(operand)}u + {name}_place);")
            together = self.tiling.threads // octets  # keys, or values, of which all threads together copy an octet
            for first in range(0, keys, together):
                begun = f"copy_ahead<16>(to + {first * PACK}, from + {first * view.strides[2]});"
                if view.shape[2] % keys:
                    nothing = f"*(Pack<u32, 4>*)(to + {first * PACK}) = Pack<u32, 4>{{0u, 0u, 0u, 0u}};"
                    there = f"{round} * {keys}u + {first}u + {name}_own < {view.shape[2]}u"
                    begun = f"{{ if ({there}) {begun} else {nothing} }}"
                some = self.tiling.threads % octets or first + together > keys
                lines.append(f"if ({name}_own < {min(together, keys - first)}u) {begun}" if some else begun)
            lines.append("}")
        return [*lines, "copied();"]

    def loop_over_rounds(self, weigh: list[str]) -> list[str]:
        steps, sizes = self.tiling.keys // self.tiling.step, (self._size(1), self._size(2))
        come = ("seen_by_groups();", "has_come(come);")
        following = f"s + 1 < {steps} ? own_keys : next_keys, (s + 1) % {steps} * {self.tiling.step * PACK * 2}"
        return [
            "const u32 second = begin + 1u < rounds ? begin + 1u : 0u;",
            *(*self._pieces(), *self.copy_round("begin", "0u")),
            *("if (1u < rounds) {", *self.copy_round("second", "1u"), "} else copied();"),
            *("wait_for_copies<1>();", *come, "wait_for_all(come, 0u);"),
            f"float scores[1][{self.tiling.step // 8}][4];",
            *wgmma.pin_numbers("sums[0]", self.width),  # they are zero before products run
            *("group_begins();", *self._issue_scores("kept_keys, 0"), "group_ends();"),
            *("bool fresh = true;", "u32 stage = 0u, round = begin;", "#pragma unroll 1"),
            *("for (u32 turn = 0; turn < rounds; ++turn) {", "wait_for_copies<0>();", *come),
            "const u32 following = round + 1u < rounds ? round + 1u : 0u;",
            f"const u32 next = stage + 1u < {STAGES}u ? stage + 1u : 0u;",
            "if (turn + 2u < rounds) {",
            "const u32 last = following + 1u < rounds ? following + 1u : 0u;",
            f"const u32 later = next + 1u < {STAGES}u ? next + 1u : 0u;",
            *(*self.copy_round("last", "later"), "} else copied();"),
            f"const {self.kind}* own_keys = kept_keys + stage * {sizes[0]}u;",
            f"const {self.kind}* next_keys = kept_keys + next * {sizes[0]}u;",
            f"const {self.kind}* own_values = kept_values + stage * {sizes[1]}u;",
            *("#pragma unroll", f"for (int s = 0; s < {steps}; ++s) {{", *self._wait(), *weigh),
            f"if (s + 1 == {steps}) wait_for_all(come, turn + 1u);",
            *("group_begins();", *self._issue_scores(following), *self._issue_sums(), "group_ends();", "}"),
            *("stage = next;", "round = following;", "}", *self._wait()),
        ]

    def _wait(self) -> list[str]:
        """Wait until products have written scores and sums."""
        scores, sums = wgmma.pin_numbers("scores[0]", self.tiling.step // 8), wgmma.pin_numbers("sums[0]", self.width)
        return ["wait_for_groups<0>();", *scores, *sums]

    def _issue_scores(self, keys: str) -> list[str]:
        """Issue products of queries by the keys at `keys`."""
        octet, lines = self._octet(1), list[str]()
        for o in range(0, self.depth, 2):
            words = ", ".join(f"query[0][{o + i}][{h}]" for i in (0, 1) for h in (0, 1))
            at = f"{keys} + {2 * o * octet}, {2 * octet}u, 128u, {int(o > 0)}"
            lines.append(f"{{ const u32 words[4] = {{{words}}};")
            lines.append(f"ENTRY_{self.tiling.step}(scores[0], words, {at}); }}")
        return lines

    def _issue_sums(self) -> list[str]:
        """Issue products of weights by the values of a step."""
        step, octet, lines = self.tiling.step, self._octet(2), list[str]()
        for n in range(0, step // 8, 2):
            words = ", ".join(f"power[0][{n + i}][{h}]" for i in (0, 1) for h in (0, 1))
            at = f"own_values, (s * {step} + {n * 8}) * {2 * PACK}, 128u, {2 * octet}u, 1"
            lines.append(f"{{ const u32 words[4] = {{{words}}};")
            lines.append(f"ENTRY_{self.width * 8}_turned(sums[0], words, {at}); }}")
        return lines
