"""Predict the cuDNN graphs of a program for other sizes of the model's inputs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from fusec.lowering.cudnn_graph import CudnnGraph, CudnnTensor

SizedGraph = tuple[tuple[int, ...], CudnnGraph]  # sizes of the model's inputs, and a graph of its program


def extrapolate(one: SizedGraph, other: SizedGraph, sizes: tuple[int, ...]) -> CudnnGraph | None:
    """Extrapolate a graph to other sizes of the model from two; None if its numbers do not grow evenly."""
    changes = [(a, b, size) for a, b, size in zip(one[0], other[0], sizes, strict=True) if a != b or size != a]
    steps = {Fraction(size - a, b - a) for a, b, size in changes if a != b}
    if len(steps) != 1 or any(a == b for a, b, _ in changes):
        return None
    (step,) = steps
    tensors: list[CudnnTensor] = []
    for first, second in zip(one[1].tensors, other[1].tensors, strict=True):
        dims, strides = _step_from(first.dims, second.dims, step), _step_from(first.strides, second.strides, step)
        if dims is None or strides is None or any(d < 1 for d in dims):
            return None
        tensors.append(replace(first, dims=dims, strides=strides))
    return replace(one[1], tensors=tuple(tensors))


def scale_batch(known: SizedGraph, sizes: tuple[int, ...]) -> CudnnGraph | None:
    """Guess a graph for other sizes of the model: its outermost dim changes by the factor of the sizes.

    Returns None if sizes change by several factors, or the dim would not be a whole number.
    """
    before, graph = known
    factors = {Fraction(b, a) for a, b in zip(before, sizes, strict=True) if a != b and a}
    if len(factors) != 1 or not graph.outputs:
        return None
    (factor,) = factors
    rows = graph.outputs[0].dims[0]
    filters = {call.inputs[1] for call in graph.calls if call.op == "conv_fprop"}
    if rows == 1 or (rows * factor).denominator > 1 or rows * factor <= 1:
        return None
    grown = (int(rows * factor),)
    return replace(
        graph,
        tensors=tuple(
            replace(t, dims=(*grown, *t.dims[1:])) if t.dims[0] == rows and t.uid not in filters else t
            for t in graph.tensors
        ),
    )


def _step_from(first: tuple[int, ...], second: tuple[int, ...], step: Fraction) -> tuple[int, ...] | None:
    """Add `step` times the difference of the two to the first; None if the results are not whole numbers."""
    numbers = [a + (b - a) * step for a, b in zip(first, second, strict=True)]
    return None if any(n.denominator > 1 for n in numbers) else tuple(map(int, numbers))
