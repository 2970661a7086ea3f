"""Read the figures of the GPU that kernels are shaped for from its target.

They decide how kernels split their elements among blocks, and which variants exist: a launch that needs more shared
memory than a block may have, or clusters that the GPU lacks, is not generated. Results are right whatever the figures.
"""

from __future__ import annotations

import json

from fusec.system.dataclass import dataclass
from fusec.targets.target import STATIC_BYTES, Target, resident_cache_bytes

REGISTERS = 1 << 16  # of a multiprocessor, on every GPU since Kepler


@dataclass(frozen=True)
class GpuFigures:
    """Figures of a GPU.

    sm: compute capability, 90 for 9.0.
    processors: streaming multiprocessors.
    processor_threads: threads that one multiprocessor holds at the same time.
    static_bytes: static shared memory of a block, at most.
    shared_bytes: static and dynamic shared memory of a block together, at most.
    cache_bytes: size of the second-level cache.
    intensity: multiplications of 16-bit numbers that tensor cores do while memory moves one such number, in tens. With
        more for each number, arithmetic bounds a product, and with fewer memory.
    """

    sm: int
    processors: int
    processor_threads: int
    static_bytes: int
    shared_bytes: int
    cache_bytes: int
    intensity: int

    @classmethod
    def of(cls, target: Target) -> GpuFigures:
        """Return the figures of a target."""
        properties = json.loads(target.properties)
        return cls(
            sm=target.sm,
            processors=int(properties["multiProcessorCount"]),
            processor_threads=int(properties["maxThreadsPerSM"]),
            static_bytes=int(properties["maxSharedMemoryPerBlock"]),
            shared_bytes=int(properties["maxSharedMemoryPerBlockOptin"]),
            cache_bytes=int(properties["l2CacheSize"]),
            # operations are two for each multiplication, and bytes are two for each number
            intensity=int(target.flops["fp16"] / target.memory_bandwidth) // 10 * 10,
        )

    @property
    def dynamic_bytes(self) -> int:
        """Dynamic shared memory of a block whose source declares little static shared memory, at most."""
        return self.shared_bytes - STATIC_BYTES

    @property
    def resident_cache_bytes(self) -> int:
        """Bytes of the second-level cache that hold elements from one pass of a kernel to the next."""
        return resident_cache_bytes(self.cache_bytes)

    @property
    def enough_blocks(self) -> int:
        """Blocks that fill the GPU: about one for each multiprocessor.

        It is the largest power of two that does not exceed the multiprocessors, because work is split in halves. On an
        H200 it is 128, which was measured.
        """
        return _power_of_two_in(self.processors)

    @property
    def enough_threads(self) -> int:
        """Threads that fill the GPU: about half of those that its multiprocessors hold.

        It is the largest power of two that does not exceed this half. On an H200 it is 131,072, which was measured.
        """
        return _power_of_two_in(self.processors * self.processor_threads // 2)

    def has(self, architecture: str) -> bool:
        """Tell if the GPU has the instructions of an architecture: see `Launch.architecture`."""
        first = int(architecture.strip("sm_a") or 0)
        return self.sm == first if architecture.endswith("a") else self.sm >= first


def _power_of_two_in(n: int) -> int:
    """Return the largest power of two that is at most n, and at least 1."""
    return 1 << max(0, n.bit_length() - 1)
