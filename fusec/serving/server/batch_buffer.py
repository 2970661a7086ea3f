"""Gather the rows of a batch in memory from which the device reads them fast."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fusec.ir import DType, TensorType
from fusec.lowering.packing import empty
from fusec.runtime import Executable

Arrays = Mapping[str, Any]


class BatchBuffer:
    """The inputs of one batch on the host, and on a GPU also there.

    On a GPU, host memory is page-locked and copied on a stream of its own, so that the copy of the next batch overlaps
    the run of this one. Inputs in another memory order, or of types that CuPy lacks, are copied by the executable.
    """

    def __init__(self, program: Executable):
        xp: Any = program.backend.xp
        self.host: dict[str, np.ndarray[Any, Any]] = {}
        self._device: dict[str, Any] = {}
        self._stream: Any = None
        for spec in program.inputs:
            if xp is np or spec.order or spec.is_narrow or spec.dtype.name == "bfloat16":
                self.host[spec.name] = empty(np, TensorType(spec.shape, DType.of(spec.dtype), spec.order))
                continue
            self._stream = self._stream or xp.cuda.Stream(non_blocking=True)
            memory = xp.cuda.alloc_pinned_memory(max(1, math.prod(spec.shape) * spec.dtype.itemsize))
            self.host[spec.name] = np.frombuffer(memory, spec.dtype, math.prod(spec.shape)).reshape(spec.shape)
            self._device[spec.name] = xp.empty(spec.shape, spec.dtype)

    def fill(self, requests: Iterable[Arrays], size: int) -> Arrays:
        """Copy the rows of requests one after the other, and copies of the last row up to the size of the batch.

        Returns the feeds of the program: arrays on the device where they are there.
        """
        start = 0
        for arrays in requests:
            end = start + len(next(iter(arrays.values())))
            for name, rows in arrays.items():
                self.host[name][start:end] = rows
            start = end
        for buffer in self.host.values():
            buffer[start:size] = buffer[start - 1]
        for name, array in self._device.items():
            array.set(self.host[name], stream=self._stream)
        if self._stream is not None:
            self._stream.synchronize()
        return {**self.host, **self._device}
