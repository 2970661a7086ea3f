"""Describe the shapes of a `.fusec` file that holds programs for several sets of input shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusec.errors import ModelError
from fusec.frontends import Declaration
from fusec.ir import DType
from fusec.system.dataclass import dataclass

# input shapes that are padded, and for each output the crops, each as (axis, outer, size, rest)
Padded = tuple[tuple[tuple[int, ...], ...], tuple[tuple[tuple[int, int, int, int], ...], ...]]


@dataclass(frozen=True)
class ShapeTable:
    """Inputs and outputs with symbolic dims, and the sizes of these.

    ranges: least, likely and largest size, by name of the dim.
    buckets: sizes to which smaller ones are padded.
    padded: all input shapes that may be padded, with the crops of the results.
    """

    inputs: tuple[Declaration, ...]
    outputs: tuple[Declaration, ...]
    ranges: Mapping[str, tuple[int, int, int]]
    buckets: Mapping[str, Sequence[int]]
    padded: tuple[Padded, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "inputs": [_plain(each) for each in self.inputs],
            "outputs": [_plain(each) for each in self.outputs],
            "ranges": {name: list(sizes) for name, sizes in self.ranges.items()},
            "buckets": {name: list(sizes) for name, sizes in self.buckets.items()},
            "padded": [[key, crops] for key, crops in self.padded],
        }

    @classmethod
    def from_json(cls, data: Any, file: str) -> ShapeTable:
        """Read plain data. Raises ModelError if it has another form than `to_json` writes."""
        try:
            return cls(
                tuple(_declaration(each) for each in data["inputs"]),
                tuple(_declaration(each) for each in data["outputs"]),
                {str(name): _triple(sizes) for name, sizes in data["ranges"].items()},
                {str(name): tuple(map(int, sizes)) for name, sizes in data["buckets"].items()},
                tuple((_shapes(key), tuple(_crop(each) for each in crops)) for key, crops in data["padded"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{file}: its table of shapes has another form than fusec writes: {error!r}") from error


def _plain(each: Declaration) -> list[Any]:
    return [each.name, None if each.dtype is None else each.dtype.value, None if each.dims is None else list(each.dims)]


def _declaration(data: Any) -> Declaration:
    name, dtype, dims = data
    if dims is not None and not all(type(d) in (int, str) for d in dims):
        raise ValueError(f"dims {dims}")
    return Declaration(str(name), None if dtype is None else DType(dtype), None if dims is None else tuple(dims))


def _triple(sizes: Any) -> tuple[int, int, int]:
    least, likely, most = map(int, sizes)
    return least, likely, most


def _shapes(key: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, shape)) for shape in key)


def _crop(steps: Any) -> tuple[tuple[int, int, int, int], ...]:
    found: list[tuple[int, int, int, int]] = []
    for step in steps:
        axis, outer, size, rest = map(int, step)
        found.append((axis, outer, size, rest))
    return tuple(found)
