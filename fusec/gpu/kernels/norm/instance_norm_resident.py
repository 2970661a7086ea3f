"""Generate instance norms in one launch, for channels last: threads keep the elements that they summed in registers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.kernel import Arguments, Kernel, ceil_div
from fusec.gpu.kernels.norm.instance_norm_source import Chunking, InstanceNormSource
from fusec.gpu.kernels.norm.resident_norm import ResidentNorm, meet_at_counter


@dataclass(frozen=True)
class InstanceNormResident(ResidentNorm):
    """A norm whose blocks share images and wait for each other. Each thread keeps `norm.turns` vectors."""

    norm: InstanceNormSource

    def kernel(self) -> Kernel | None:
        """Return the kernel; None if an image does not fit on the GPU."""
        norm, number = self.norm, self._chunks.number
        if norm.turns < norm.taps or number > self._most_blocks:
            return None
        arguments = Arguments()
        lines = norm.cuda(
            "resident",
            SHARED=[norm.sum_memory, norm.merge_memory],
            CHUNKS=number,
            IMAGES=norm.x.type.shape[0] * norm.columns,
            TEAMS=self._teams,
            BODY=self.resident_body(arguments),
        )
        launch = arguments.launch("instance_resident", lines, self._teams * number, norm.block)
        scratch_bytes = 2 * norm.x.type.shape[0] * number * norm.channels * 4
        return Kernel(norm.name, (replace(launch, meets=number > 1),), scratch_bytes)

    @property
    def _chunks(self) -> Chunking:
        return Chunking(self.norm.pixels // self.norm.taps, self.norm.threads * self.norm.units)

    @property
    def _most_blocks(self) -> int:
        """Blocks that run at the same time, as registers allow."""
        return self.norm.figures.processors * (3 if self.norm.turns < 8 else 2)

    @property
    def _teams(self) -> int:
        """Images, or parts of them by channels, that are on the GPU at the same time."""
        return min(self.norm.x.type.shape[0] * self.norm.columns, self._most_blocks // self._chunks.number)

    def sum_elements(self, arguments: Arguments) -> list[str]:
        norm, chunks, image = self.norm, self._chunks, arguments.read(self.norm.x)
        start = norm.pixel("begin", "0u")
        return [
            *norm.cuda("resident_place", EACH=chunks.each, COUNT=chunks.count, START=start),
            *norm.load_centre(image, "start"),
            *norm.load_units(image),
            *norm.cuda("sum_taken"),
        ]

    def store_sums(self, arguments: Arguments) -> list[str]:
        count = f"float((end - begin) * {self.norm.taps}u)"
        return self.norm.store_chunk(arguments.scratch(), self._chunks.number, count)

    def meet(self, arguments: Arguments) -> list[str]:
        arguments.doors(self._teams)  # also of a single block, because the kernel's name depends on its parameters
        return meet_at_counter(arguments, self._teams, "team", self._chunks.number)

    def merge_sums(self, arguments: Arguments) -> list[str]:
        return self.norm.merge_chunks(self._chunks, "column", lambda at: f"across({arguments.scratch()} + ({at}))")

    def write_elements(self, arguments: Arguments) -> list[str]:
        parameters = self.norm.parameters(arguments)
        return [*parameters, *self.norm.cuda("write_taken", STORE_UNIT=self.norm.store_unit(arguments))]


@dataclass(frozen=True)
class InstanceNormOneBlock(InstanceNormResident):
    """A norm of large blocks, each with some channels of a whole image, so that no block waits for another."""

    def kernel(self) -> Kernel | None:
        """Return the kernel; None if a thread would have to keep more than `norm.turns` vectors."""
        turns = self.norm.taps * ceil_div(self._chunks.count, self.norm.threads)
        if turns > self.norm.turns:
            return None
        norm, arguments = replace(self.norm, turns=turns), Arguments()
        lines = [
            norm.sum_memory,
            f"__shared__ float means[{norm.own}], factors[{norm.own}];",
            "const u32 number = blockIdx.x, chunk = 0u;",
            *InstanceNormOneBlock(norm).resident_body(arguments),
        ]
        launch = arguments.launch("instance_alone", lines, norm.x.type.shape[0] * norm.columns, norm.block)
        return Kernel(norm.name, (launch,))

    @property
    def _chunks(self) -> Chunking:
        count = self.norm.pixels // self.norm.taps
        return Chunking(count, count)

    def store_sums(self, arguments: Arguments) -> list[str]:
        return self.norm.merge_warps(self.norm.channel_statistics("centres[i]"))

    def meet(self, arguments: Arguments) -> list[str]:
        return meet_at_counter(arguments, 0, "", 1)

    def merge_sums(self, arguments: Arguments) -> list[str]:
        return []
