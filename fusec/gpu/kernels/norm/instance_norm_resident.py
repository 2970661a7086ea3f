"""Sources of instance norms in one launch: blocks keep what they read of an image in registers until its sums are
known, those of all of its blocks, which meet, or those of one that has it for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.kernel import Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import PROCESSORS, nested
from fusec.gpu.kernels.norm.instance_norm_source import Norm, Share


@dataclass(frozen=True)
class KeptNorm(Norm):
    """A norm whose threads keep `turns` vectors each."""

    def resident(self) -> Kernel | None:
        """One launch: blocks keep their part of an image in registers while those of an image meet, and then go on to
        another image; None if an image has no room on the GPU."""
        share = Share(self.pixels // self.taps, self.threads * self.units)
        images = self.x.type.shape[0]
        at_once = PROCESSORS * (3 if self.turns < 8 else 2)  # as registers allow
        if self.turns < self.taps or share.chunks > at_once:
            return None
        teams = min(images * self.columns, at_once // share.chunks)
        arguments = Arguments()
        image, scratch, doors = arguments.read(self.x), arguments.scratch(), arguments.doors(teams)
        lines = [
            *(self._room, self._merging),
            f"const u32 team = blockIdx.x / {share.chunks}u, chunk = blockIdx.x % {share.chunks}u;",
            *("#pragma unroll 1", f"for (u32 number = team; number < {images * self.columns}u; number += {teams}u) {{"),
            *self._kept(image, share),
            *self._handed_over(scratch, share.chunks, f"float((end - begin) * {self.taps}u)"),
            f"meet({doors} + team * DOOR, {share.chunks}u);" if share.chunks > 1 else "__syncthreads();",
            *self._merged(share, "column", lambda at: f"across({scratch} + ({at}))"),
            *self._kept_written(arguments),
            "}",
        ]
        launch = arguments.launch("instance_resident", lines, teams * share.chunks, self.block)
        scratch_bytes = 2 * images * share.chunks * self.channels * 4
        return Kernel(self._name, (replace(launch, meets=share.chunks > 1),), scratch_bytes)

    def alone(self) -> Kernel | None:
        """One launch of large blocks, each of which keeps some channels of a whole image; None if it has no room."""
        count = self.pixels // self.taps
        if self.taps * ceil_div(count, self.threads) > self.turns:
            return None
        share, arguments = Share(count, count), Arguments()
        one = replace(self, turns=self.taps * ceil_div(count, self.threads))
        image = arguments.read(self.x)
        lines = [
            *(one._room, f"__shared__ float means[{self._own}], factors[{self._own}];"),
            "const u32 number = blockIdx.x, chunk = 0u;",
            *one._kept(image, share),
            *(*one._together(*one._concluded("centres[i]")), "__syncthreads();"),
            *one._kept_written(arguments),
        ]
        launch = arguments.launch("instance_alone", lines, self.x.type.shape[0] * self.columns, self.block)
        return Kernel(self._name, (launch,))

    def _kept(self, image: str, share: Share) -> list[str]:
        """A part of an image, in `taken`, and its sums: of images and groups of channels that with a number, of its
        units those of a chunk."""
        return [
            f"const u32 lane = threadIdx.x % {self.lanes}u, t = threadIdx.x / {self.lanes}u;",
            f"const u32 begin = chunk * {share.each}u, unit = begin + t;",
            f"const u32 end = begin + {share.each}u < {share.count}u ? begin + {share.each}u : {share.count}u;",
            f"const u32 image = number / {self.columns}u, column = number % {self.columns}u;",
            f"const u32 first_channel = column * {self._own}u, channel = first_channel + lane * {self.vector}u;",
            f"{self._pack} taken[{self.units}][{self.taps}];",
            f"const u32 start = {self._pixel('begin', '0u')};",
            *self._around(image, "start"),
            *self._windows(image),
            *("#pragma unroll", f"for (int i = 0; i < {self.units}; ++i) {{"),
            f"const bool live = unit + i * {self.threads}u < end;",
            *nested([("k", self.taps), ("j", self.vector)], *self._added("taken[i][k].v[j]")),
            "}",
        ]

    def _kept_written(self, arguments: Arguments) -> list[str]:
        lines = [*self._parameters(arguments), "#pragma unroll", f"for (int i = 0; i < {self.units}; ++i) {{"]
        lines += [f"const u32 at = unit + i * {self.threads}u;", "if (at < end) {", *self._stored(arguments)]
        return [*lines, "}", "}"]
