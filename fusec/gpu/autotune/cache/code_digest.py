"""Digest the code that enumerates and times candidates, because stored choices depend on it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cache

from fusec.gpu import autotune, cublaslt, kernels, measure
from fusec.passes import partition

MAX_SOURCE_BYTES = 1 << 20  # of one file; all are much smaller


@cache
def candidate_code_digest() -> str:
    """Return a digest of the code that enumerates and times candidates, because choices depend on it."""
    digest = hashlib.sha256()
    for package in (autotune, cublaslt, kernels, measure, partition):
        for source in _sources(package.__path__[0]):
            digest.update(source)
    return digest.hexdigest()


def _sources(folder: str) -> Iterator[bytes]:
    """Yield the source files below a folder, in the order of their names, with few calls for each file.

    Some file systems take long for each call.
    """
    for entry in sorted(os.scandir(folder), key=lambda each: each.name):
        if entry.is_dir():
            yield from _sources(entry.path)
        elif entry.name.endswith((".py", ".cuh")):
            handle = os.open(entry.path, os.O_RDONLY)
            try:
                yield os.read(handle, MAX_SOURCE_BYTES)
            finally:
                os.close(handle)
