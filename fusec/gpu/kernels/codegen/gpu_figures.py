"""Figures of the GPU that kernels are shaped for, from the file of the default target.

They decide how kernels split their elements among blocks. The results are right on any GPU, whatever the figures.
"""

from __future__ import annotations

import json

from fusec.targets.target import DEFAULT, load, names

_PROPERTIES = json.loads(load(DEFAULT).properties)
PROCESSORS = int(_PROPERTIES["multiProcessorCount"])
PROCESSOR_THREADS = int(_PROPERTIES["maxThreadsPerSM"])
SHARED_BYTES = int(_PROPERTIES["maxSharedMemoryPerBlock"])  # of a block that asks for no more
RESERVED_BYTES = 3 << 10  # left free of the following, because sources declare static shared memory, too
MOST_SHARED_BYTES = int(_PROPERTIES["maxSharedMemoryPerBlockOptin"]) - RESERVED_BYTES
CACHE_BYTES = int(_PROPERTIES["l2CacheSize"])


def target_sizes() -> tuple[tuple[int, int], ...]:
    """Return multiprocessors, and shared memory of a block in bytes, of all targets; the default target comes first.

    Kernels whose blocks must all run at the same time have a variant for each. Targets with more of both are left out.
    """
    every = (json.loads(load(name).properties) for name in names())
    sizes = {(p["multiProcessorCount"], p["maxSharedMemoryPerBlockOptin"] - RESERVED_BYTES) for p in every}
    largest = (PROCESSORS, MOST_SHARED_BYTES)
    return (largest, *sorted({size for size in sizes if size < largest}, reverse=True))
