"""Compute the buffers of a lowered step before it runs, and its expected outputs, by uid.

Buffers are flat and in the layout of the graph, so that a script copies them to the device unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fusec.diagnostics.verify import allowed_error, random_array
from fusec.errors import ExecutionError
from fusec.ir import DType, Graph, HostArray, TensorType, Value
from fusec.lower_cudnn import Lowered
from fusec.lowering.packing import pack
from fusec.lowering.simulator import Buffer, extent, simulate, view
from fusec.repro.source import AS_BITS, NAMES
from fusec.system.dataclass import dataclass

# Errors below this are no bug: cuDNN's fp32 approximations of tanh, erf and similar functions are coarser than
# rounding (1.1e-5 was measured on an H200).
LEAST_ALLOWED = 2e-5
FP8_ALLOWED = 2.0**-4  # half a step of fp8: sums in another order round some numbers to the code next to the right one
_POISON = 77  # the wrong value where NaN cannot be: in integers, and where NaN is right


@dataclass(frozen=True)
class Data:
    """Buffers of a step by uid.

    before: inputs, constants, and outputs with wrong values.
    expected: outputs as simulated.
    allowed: relative L2 error that rounding explains, for each output.
    """

    before: Mapping[int, Buffer]
    expected: Mapping[int, Buffer]
    allowed: Mapping[int, float]


def make(body: Graph, lowered: Lowered, seed: int, feeds: Mapping[str, HostArray] | None = None) -> Data:
    """Compute the buffers from inputs by name, or from random ones.

    lowered: the cuDNN graph of the body, whose tensors the buffers are for.
    seed: seed of the random inputs.
    feeds: inputs by name.
    Raises ExecutionError if an input is missing, or has another shape or dtype.
    """
    rng = np.random.default_rng(seed)
    arrays = {v.name: _random(rng, v.type) if feeds is None else _given(v, feeds) for v in body.inputs}
    types = {v.name: v.type for v in body.inputs}
    buffers = {uid: lowered.part(uid, pack(np, arrays[name], types[name])) for uid, name in lowered.inputs}
    buffers |= {c.uid: pack(np, c.literal.array, c.type) for c in lowered.constants}
    outputs = {t.uid: np.zeros(extent(t), t.dtype.numpy) for t in lowered.graph.outputs}
    simulate(lowered.graph, {**buffers, **outputs})
    poisoned = {uid: array.copy() for uid, array in outputs.items()}
    for tensor in lowered.graph.outputs:
        written = view(tensor, poisoned[tensor.uid])  # only the elements, not the gaps between them
        written[...] = _poison(written)
    least = {t.uid: FP8_ALLOWED if t.dtype is DType.F8E4M3 else LEAST_ALLOWED for t in lowered.graph.outputs}
    allowed = {t.uid: max(allowed_error(body, t.dtype, lowered.graph), least[t.uid]) for t in lowered.graph.outputs}
    return Data({**buffers, **poisoned}, outputs, allowed)


def _random(rng: np.random.Generator, type: TensorType) -> HostArray:
    if type.dtype is DType.F8E4M3:
        return rng.standard_normal(type.shape).astype(type.dtype.numpy)
    return random_array(rng, type)


def _given(value: Value, feeds: Mapping[str, HostArray]) -> HostArray:
    if value.name not in feeds:
        raise ExecutionError(f"no array for input {value.name!r}")
    array = feeds[value.name]
    if array.shape != value.type.shape or array.dtype != value.type.dtype.numpy:
        raise ExecutionError(f"input {value!r} does not take {array.dtype}{list(array.shape)}")
    return array


def _poison(right: HostArray) -> HostArray:
    """Fill an output with values that are wrong everywhere."""
    if right.dtype == np.bool_:
        return ~right
    if right.dtype.kind in "iu":
        return np.where(right == _POISON, _POISON + 1, _POISON)
    return np.where(np.isnan(right), _POISON, np.nan)


def save(path: Path, buffers: Mapping[int, Buffer]) -> None:
    """Write a .npz with an array for each uid. bfloat16 and fp8 are stored as their bits, because numpy lacks them."""
    arrays: dict[str, Any] = {str(uid): _bits(buffer) for uid, buffer in sorted(buffers.items())}
    np.savez(path, **arrays)


def _bits(buffer: Buffer) -> Buffer:
    return next((buffer.view(NAMES[dtype][2]) for dtype in AS_BITS if buffer.dtype == dtype.numpy), buffer)
