"""Generate instance norms in one launch, which keeps what it read of an image in registers until its sums are known.

Either the blocks of an image wait for each other, or one block handles all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.gpu_figures import PROCESSORS
from fusec.gpu.kernels.codegen.kernel import Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import unrolled_loops
from fusec.gpu.kernels.norm.instance_norm_source import Chunking, InstanceNormSource


@dataclass(frozen=True)
class InstanceNormResident(InstanceNormSource):
    """A norm whose threads keep `turns` vectors each."""

    def resident(self) -> Kernel | None:
        """Return a kernel whose blocks share images and wait for each other; None if an image does not fit on the GPU.

        Blocks that have finished an image continue with another one.
        """
        chunks = Chunking(self.pixels // self.taps, self.threads * self.units)
        images = self.x.type.shape[0]
        at_once = PROCESSORS * (3 if self.turns < 8 else 2)  # as registers allow
        if self.turns < self.taps or chunks.number > at_once:
            return None
        teams = min(images * self.columns, at_once // chunks.number)
        arguments = Arguments()
        image, scratch, doors = arguments.read(self.x), arguments.scratch(), arguments.doors(teams)
        lines = [
            *(self._sum_memory, self._merge_memory),
            f"const u32 team = blockIdx.x / {chunks.number}u, chunk = blockIdx.x % {chunks.number}u;",
            *("#pragma unroll 1", f"for (u32 number = team; number < {images * self.columns}u; number += {teams}u) {{"),
            *self._cached_pass(image, chunks),
            *self._store_chunk(scratch, chunks.number, f"float((end - begin) * {self.taps}u)"),
            f"meet({doors} + team * DOOR, {chunks.number}u);" if chunks.number > 1 else "__syncthreads();",
            *self._merge_chunks(chunks, "column", lambda at: f"across({scratch} + ({at}))"),
            *self._write_cached(arguments),
            "}",
        ]
        launch = arguments.launch("instance_resident", lines, teams * chunks.number, self.block)
        scratch_bytes = 2 * images * chunks.number * self.channels * 4
        return Kernel(self._name, (replace(launch, meets=chunks.number > 1),), scratch_bytes)

    def one_block(self) -> Kernel | None:
        """Return a kernel of large blocks, each with some channels of a whole image; None if it does not fit."""
        count = self.pixels // self.taps
        if self.taps * ceil_div(count, self.threads) > self.turns:
            return None
        chunks, arguments = Chunking(count, count), Arguments()
        one = replace(self, turns=self.taps * ceil_div(count, self.threads))
        image = arguments.read(self.x)
        lines = [
            *(one._sum_memory, f"__shared__ float means[{self._own}], factors[{self._own}];"),
            "const u32 number = blockIdx.x, chunk = 0u;",
            *one._cached_pass(image, chunks),
            *(*one._merge_warps(*one._channel_statistics("centres[i]")), "__syncthreads();"),
            *one._write_cached(arguments),
        ]
        launch = arguments.launch("instance_alone", lines, self.x.type.shape[0] * self.columns, self.block)
        return Kernel(self._name, (launch,))

    def _cached_pass(self, image: str, chunks: Chunking) -> list[str]:
        """Load a chunk of an image into `taken`, and sum it.

        `number` counts images and groups of channels.
        """
        return [
            f"const u32 lane = threadIdx.x % {self.lanes}u, t = threadIdx.x / {self.lanes}u;",
            f"const u32 begin = chunk * {chunks.each}u, unit = begin + t;",
            f"const u32 end = begin + {chunks.each}u < {chunks.count}u ? begin + {chunks.each}u : {chunks.count}u;",
            f"const u32 image = number / {self.columns}u, column = number % {self.columns}u;",
            f"const u32 first_channel = column * {self._own}u, channel = first_channel + lane * {self.vector}u;",
            f"{self._pack} taken[{self.units}][{self.taps}];",
            f"const u32 start = {self._pixel('begin', '0u')};",
            *self._load_centre(image, "start"),
            *self._load_windows(image),
            *("#pragma unroll", f"for (int i = 0; i < {self.units}; ++i) {{"),
            f"const bool live = unit + i * {self.threads}u < end;",
            *unrolled_loops([("k", self.taps), ("j", self.vector)], *self._accumulate("taken[i][k].v[j]")),
            "}",
        ]

    def _write_cached(self, arguments: Arguments) -> list[str]:
        lines = [*self._parameters(arguments), "#pragma unroll", f"for (int i = 0; i < {self.units}; ++i) {{"]
        lines += [f"const u32 at = unit + i * {self.threads}u;", "if (at < end) {", *self._store_unit(arguments)]
        return [*lines, "}", "}"]
