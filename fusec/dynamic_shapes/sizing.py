"""Hold the dims of a model's inputs and outputs, and the sizes that each may have."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from fusec.errors import ExecutionError, FusecError
from fusec.execution.signature import SymbolicSpec
from fusec.frontends import Declaration
from fusec.ir import quote
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable

Shapes = Mapping[str, Sequence[int]]
Sizes = Mapping[str, int]  # by name of a symbolic dim
Key = tuple[tuple[int, ...], ...]  # the shape of each input


def spec_of(declared: Declaration) -> SymbolicSpec:
    """Describe a declared input or output."""
    return SymbolicSpec(declared.name, declared.dims, None if declared.dtype is None else declared.dtype.numpy)


def resized(spec: SymbolicSpec, shape: tuple[int, ...], sizes: Sizes) -> tuple[int, ...]:
    """Return a shape of an input with other sizes for some named dims."""
    named = spec.shape or (None,) * len(shape)
    return tuple(sizes.get(d, size) if isinstance(d, str) else size for d, size in zip(named, shape, strict=True))


@dataclass(frozen=True)
class SizeRange:
    """The sizes that a dim may have. `likely` is compiled first, and other sizes take over its choices."""

    least: int
    likely: int
    most: int

    @classmethod
    def of(cls, what: str, given: Any) -> SizeRange:
        """Read a size, `(least, most)`, `(least, likely, most)`, `least..most` or `least..likely..most`.

        what: the name of the dim, for messages. Without a likely size, it is the largest one.
        Raises FusecError if it is something else, or the sizes do not grow.
        """
        try:
            if isinstance(given, str):
                sizes = [int(part) for part in given.split("..")]
            elif isinstance(given, Sequence):
                numbers = cast("Sequence[Any]", given)
                if len(numbers) == 1 and isinstance(numbers[0], str):  # as the command line splits it at commas
                    return cls.of(what, numbers[0])
                sizes = [operator.index(size) for size in numbers]
            else:
                sizes = [operator.index(given)]
        except (TypeError, ValueError):
            sizes = []
        if len(sizes) not in (1, 2, 3):
            raise FusecError(f"{what} is {given!r}, but must be a size, or a range such as '1..32' or '1..8..32'")
        least, most = sizes[0], sizes[-1]
        likely = sizes[1] if len(sizes) == 3 else most
        if not 0 <= least <= likely <= most:
            raise FusecError(f"{what} is {given!r}, but its sizes must be 0 or more and must not fall")
        return cls(least, likely, most)

    def __contains__(self, size: object) -> bool:
        return isinstance(size, int) and self.least <= size <= self.most

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least} to {self.most}"


@dataclass(frozen=True)
class Sizing:
    """Inputs and outputs of a model, with the sizes that the caller gave.

    A dim with one size is that size. A dim with a range has a name; one without a name in the model is named by its
    input and number, such as `x[0]`.
    """

    inputs: tuple[Declaration, ...]
    outputs: tuple[Declaration, ...]
    ranges: Mapping[str, SizeRange]

    @property
    def symbols(self) -> list[str]:
        """Return the names of the symbolic dims of the inputs."""
        return list(dict.fromkeys(d for spec in self.inputs for d in spec.dims or () if isinstance(d, str) and d))

    @property
    def likely(self) -> dict[str, tuple[int, ...]] | None:
        """Return the likely shapes of the inputs; None if the size of some dim is not known."""
        return self.shapes({name: each.likely for name, each in self.ranges.items()})

    def shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the inputs for sizes of their symbolic dims; None if a size is missing."""
        found: dict[str, tuple[int, ...]] = {}
        for spec in self.inputs:
            dims = [sizes.get(d) if isinstance(d, str) else d for d in spec.dims or (None,)]
            known = tuple(d for d in dims if d is not None)
            if len(known) < len(dims):
                return None
            found[spec.name] = known
        return found

    @property
    def known_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs all of whose dims have one size."""
        found: dict[str, tuple[int, ...]] = {}
        for spec in self.inputs:
            if spec.dims is not None and all(isinstance(d, int) for d in spec.dims):
                found[spec.name] = tuple(d for d in spec.dims if isinstance(d, int))
        return found

    def representatives(self, buckets: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
        """Yield the sizes for which a file holds programs, the likely ones first.

        These are the buckets of a dim, else the least, likely and largest size of its range.
        """
        choices: list[list[int]] = []
        for name, each in self.ranges.items():
            known = buckets.get(name, ())
            sizes = {*known, *(size for size in (each.likely, each.most) if size > max(known, default=0))}
            if not known:
                sizes.add(each.least)
            first = min(size for size in sizes if size >= each.likely)  # the bucket of the likely size
            choices.append([first, *sorted(sizes - {first})])
        for chosen in itertools.product(*choices):
            yield dict(zip(self.ranges, chosen, strict=True))

    def dims(self, shapes: Shapes) -> dict[str, int]:
        """Return the sizes of the named symbolic dims. Raises ExecutionError if the shapes do not fit."""
        known = {spec.name for spec in self.inputs}
        for name in shapes:
            if name not in known:
                raise ExecutionError(
                    f"no input {quote(str(name))}; inputs are {', '.join(quote(s.name) for s in self.inputs)}"
                )
        dims: dict[str, tuple[int, str]] = {}
        for spec in self.inputs:
            if spec.name not in shapes:
                raise ExecutionError(f"input {quote(spec.name)} is missing")
            if spec.dims is None:
                continue
            shape = tuple(shapes[spec.name])
            fits = len(shape) == len(spec.dims)
            if not fits or any(isinstance(d, int) and d != size for d, size in zip(spec.dims, shape, strict=True)):
                want = ", ".join(printable(str(d)) if d != "" else "?" for d in spec.dims)
                raise ExecutionError(f"input {quote(spec.name)} has shape [{want}], the array {list(shape)}")
            for dim, size in zip(spec.dims, shape, strict=True):
                if isinstance(dim, str) and dim:
                    first = dims.setdefault(dim, (size, spec.name))
                    if first[0] != size:
                        raise ExecutionError(
                            f"dim {dim!r} is {first[0]} in input {quote(first[1])}, {size} in input {quote(spec.name)}"
                        )
        for dim, (size, name) in dims.items():
            if dim in self.ranges and size not in self.ranges[dim]:
                raise ExecutionError(
                    f"dim {dim!r} is {size} in input {quote(name)}, but this executable takes {self.ranges[dim]}"
                )
        return {dim: size for dim, (size, _) in dims.items()}

    def by_input(self, given: Shapes | Sizes) -> dict[str, tuple[int, ...]]:
        """Return shapes by input, from those or from sizes by dim."""
        sizes = {name: size for name, size in given.items() if isinstance(size, int)}
        if not sizes:
            return {name: tuple(shape) for name, shape in given.items() if not isinstance(shape, int)}
        if unknown := [name for name in given if name not in self.symbols]:
            known = printable(", ".join(self.symbols)) or "none"
            raise ExecutionError(f"there is no symbolic dim {unknown[0]!r}; those of the inputs: {known}")
        shapes = self.shapes(sizes)
        if shapes is None:
            raise ExecutionError(f"sizes are given of {', '.join(sizes)}, so other dims of the inputs have no size")
        return shapes
