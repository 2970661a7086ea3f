"""Pad inputs to the sizes that have programs, where a proof shows that the results stay the same."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fusec import frontends
from fusec.dynamic_shapes.sizing import Key, Sizes, Sizing, resized, spec_of
from fusec.errors import FusecError, ModelError
from fusec.frontends.padding_proof import Crop, crops
from fusec.ir import Array
from fusec.lowering.packing import to_logical
from fusec.runtime import Executable, on_host
from fusec.system.printable import printable


class Padding:
    """The buckets of a model's dims, and the proofs that padding to them is right.

    buckets: sizes with programs, by name of a symbolic dim, in order.
    cached: number of proofs to cache.
    proved: crops of all input shapes that may be padded; None: they are proved when a call has them.
    """

    def __init__(
        self,
        source: frontends.Source,
        sizing: Sizing,
        buckets: Mapping[str, Sequence[int]],
        cached: int,
        proved: Mapping[Key, tuple[Crop, ...]] | None = None,
    ):
        _check(source.file, sizing, buckets)
        self.buckets = {symbol: sorted(set(sizes)) for symbol, sizes in buckets.items()}
        self._source, self._sizing = source, sizing
        self._inputs = [spec_of(each) for each in sizing.inputs]
        self._proved, self._cached = proved, cached
        self._lock = threading.RLock()
        self._crops: OrderedDict[Key, tuple[Crop, ...]] = OrderedDict()

    def bucket(self, symbol: str, size: int) -> int:
        """Return the bucket of a size; a size larger than all buckets is its own."""
        return next((bucket for bucket in self.buckets[symbol] if bucket >= size), size) if size else size

    def changed(self, dims: Sizes) -> dict[str, int]:
        """Return the sizes after padding, of the dims that are padded."""
        sizes = {symbol: self.bucket(symbol, dims[symbol]) for symbol in self.buckets}
        return {symbol: size for symbol, size in sizes.items() if size != dims[symbol]}

    def padded(self, shapes: Mapping[str, tuple[int, ...]], sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs with these sizes of their dims."""
        return {spec.name: resized(spec, shapes[spec.name], sizes) for spec in self._inputs}

    def smaller(self, large: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
        """Yield the input shapes that are padded to these."""
        dims = self._sizing.dims(large)
        choices: dict[str, range] = {}
        for symbol, buckets in self.buckets.items():
            size = dims[symbol]
            if size in buckets:
                least = self._sizing.ranges[symbol].least if symbol in self._sizing.ranges else 1
                below = max([bucket for bucket in buckets if bucket < size], default=0)
                choices[symbol] = range(max(1, least, below + 1), size + 1)
        for sizes in itertools.product(*choices.values()):
            exact = {s: size for s, size in zip(choices, sizes, strict=True) if size != dims[s]}
            if exact:
                yield self.padded(large, exact)

    def crops(self, exact: Mapping[str, tuple[int, ...]]) -> tuple[Crop, ...]:
        """Return the crop of each output, cached by the input shapes.

        exact: input shapes before padding.

        Raises ModelError if padding could change a result.
        """
        key = tuple(exact[spec.name] for spec in self._inputs)
        if self._proved is not None:
            if key not in self._proved:
                raise ModelError(f"{self._source.file}: holds no proof that these shapes can be padded: {dict(exact)}")
            return self._proved[key]
        with self._lock:
            if key in self._crops:
                self._crops.move_to_end(key)
                return self._crops[key]
            found = self._prove(exact)
            self._crops[key] = found
            while len(self._crops) > self._cached:
                self._crops.popitem(last=False)
            return found

    def _prove(self, exact: Mapping[str, tuple[int, ...]]) -> tuple[Crop, ...]:
        dims = self._sizing.dims(exact)
        shapes, graph = dict(exact), self._source.load(exact)
        found = tuple(Crop() for _ in graph.outputs)
        for symbol, size in self.changed(dims).items():  # one dim at a time, because a proof is about one size
            shapes = self.padded(shapes, {symbol: size})
            wider = self._source.load(shapes)
            axes = {spec.name: [i for i, d in enumerate(spec.shape or ()) if d == symbol] for spec in self._inputs}
            try:
                steps = crops(graph, wider, axes, dims[symbol], size)
            except ModelError as error:
                raise ModelError(
                    f"{self._source.file}: dim {symbol!r} cannot be padded from {dims[symbol]} to {size}: {error}"
                ) from error
            found = tuple(step.then(crop) for step, crop in zip(steps, found, strict=True))
            graph = wider
        return found


def _check(file: str, sizing: Sizing, buckets: Mapping[str, Sequence[int]]) -> None:
    for symbol, sizes in buckets.items():
        if symbol not in sizing.symbols:
            known = printable(", ".join(sorted(sizing.symbols))) or "none"
            raise ModelError(f"{file}: there is no symbolic dim {symbol!r}; those of the inputs: {known}")
        if not sizes or any(size < 1 for size in sizes):
            raise FusecError(f"buckets of {symbol!r} are {list(sizes)}, but must be sizes of 1 or more")
        if symbol in sizing.ranges and not all(size in sizing.ranges[symbol] for size in sizes):
            raise FusecError(f"buckets of {symbol!r} are {list(sizes)}, but its sizes are {sizing.ranges[symbol]}")


def pad(name: str, array: Any, shape: tuple[int, ...], large: tuple[int, ...], program: Executable) -> Array:
    """Pad the array of an input to the larger shape with copies of its last rows, which are valid input data.

    name: name of the input.
    shape, large: shape of the array, and the larger shape.
    program: the one for the larger shape; it knows the memory order of the input.
    """
    if shape == large:
        return array
    host = on_host(array)
    own = np.asarray(array) if host else program.backend.from_any(array)
    xp = np if host else program.backend.xp
    order = next(spec.order for spec in program.inputs if spec.name == name) or tuple(range(len(shape)))
    widths = [(0, large[d] - shape[d]) for d in order]
    return to_logical(xp.pad(own.transpose(order), widths, mode="edge"), order)
