"""Figures of the GPU that kernels are shaped for, from the file of the default target.

They decide how kernels split their elements among blocks. The results are right on any GPU, whatever the figures.
"""

from __future__ import annotations

import json

from fusec.targets.target import DEFAULT, load

_PROPERTIES = json.loads(load(DEFAULT).properties)
PROCESSORS = int(_PROPERTIES["multiProcessorCount"])
PROCESSOR_THREADS = int(_PROPERTIES["maxThreadsPerSM"])
SHARED_BYTES = int(_PROPERTIES["maxSharedMemoryPerBlock"])  # of a block that asks for no more
RESERVED_BYTES = 3 << 10  # left free of the following, because sources declare static shared memory, too
MOST_SHARED_BYTES = int(_PROPERTIES["maxSharedMemoryPerBlockOptin"]) - RESERVED_BYTES
CACHE_BYTES = int(_PROPERTIES["l2CacheSize"])
