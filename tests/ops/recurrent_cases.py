"""Operands of recurrent ops, and onnxruntime's operator that computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from ops.onnx_oracle import Array, Oracle, run

from fusec.ir import DType
from fusec.ops import Recurrent
from fusec.ops.recurrent import ACTIVATIONS

Shapes = tuple[tuple[int, ...], ...]
_NAMES = {name: "".join(part.capitalize() for part in name.split("_")) for name in ACTIVATIONS}


def shapes(op: Recurrent, steps: int = 4, batch: int = 3, size: int = 5, *, more: bool = False) -> Shapes:
    """The shapes of the operands of floats; `more`: with the parameter that the cell takes."""
    count, width = op.directions, op.gates * size
    parameter = [(count, 3 * size if op.cell == "lstm" else size)] if more else []
    return (
        (steps, batch, count * width),
        (count, width, size),
        *[(count, batch, size)] * op.states,
        *parameter,
    )


def functions(op: Recurrent) -> dict[str, Any]:
    """The attributes of ONNX that name the activations: numbers of those that have one, in order."""
    if not op.activations:
        return {}
    every = [f for each in op.functions() for f in each]
    numbers = {
        f"activation_{('alpha', 'beta')[k]}": tuple(f[1 + k] for f in every if ACTIVATIONS[f[0]][k] is not None)
        for k in (0, 1)
    }
    return {"activations": tuple(_NAMES[name] for name, _, _ in every)} | {k: v for k, v in numbers.items() if v}


def onnxruntime_of(op: Recurrent) -> Oracle:
    """onnxruntime's operator with the identity as input weights."""

    def compute(*operands: Array) -> list[Array]:
        places = op.places([DType.of(a.dtype) for a in operands])
        parameter, lengths = (None if at is None else operands[at] for at in places)
        x, r, *states = operands[: 2 + op.states]
        size, width, count = r.shape[2], op.gates * r.shape[2], op.directions
        weights = np.eye(count * width, dtype=x.dtype).reshape(count, width, -1)
        bias = None
        if op.cell == "gru" and parameter is not None:
            bias = np.concatenate([np.zeros((count, 5 * size), x.dtype), parameter], axis=1)
        given: list[Array | None] = [
            x,
            weights,
            r,
            bias,
            None if lengths is None else lengths.astype(np.int32),
            *states,
        ]
        if op.cell == "lstm" and parameter is not None:
            given.append(parameter)
        flags: dict[str, Any] = {"clip": op.clip} if op.clip else {}
        if op.input_forget:
            flags["input_forget"] = 1
        if op.linear_before_reset:
            flags["linear_before_reset"] = 1
        own = {"hidden_size": size, "direction": op.direction, **flags, **functions(op)}
        y, *last = run(op.cell.upper(), given, 1 + op.states, **own)
        return [y.transpose(0, 2, 1, 3).reshape(*x.shape[:2], count * size), *last]

    return compute


def weights(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Numbers so small that the activations are not flat."""
    return (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)


def ends(steps: int) -> Callable[[np.random.Generator, tuple[int, ...]], Array]:
    """Lengths of sequences, from one to all of the steps."""
    return lambda rng, shape: rng.integers(1, steps + 1, shape)
