"""Read the sizes that a caller gives for symbolic dims: one size, or a range such as `1..32`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from fusec import frontends
from fusec.dynamic_shapes.sizing import SizeRange, Sizing
from fusec.errors import ModelError
from fusec.frontends import Declaration
from fusec.system.printable import printable

Size = int | str  # a size, or a range as text
GivenShapes = Mapping[str, Size | Sequence[Size]]


def read_sizes(source: frontends.Source, given: GivenShapes | None) -> Sizing | None:
    """Read sizes that are not simply one shape for each input; None if they are."""
    if not isinstance(given, Mapping):
        return None  # the importer reports what is no mapping
    plain = not any(isinstance(sizes, int | str) or _has_text(sizes) for sizes in given.values())
    if plain and not any(name in symbols_of(source) for name in given):
        return None
    return sizing_of(source, given)


def symbols_of(source: frontends.Source) -> set[str]:
    """Return the names of the symbolic dims of the inputs."""
    return {d for spec in source.interface[0] for d in spec.dims or () if isinstance(d, str) and d}


def _has_text(sizes: object) -> bool:
    return isinstance(sizes, Sequence) and any(isinstance(each, str) for each in cast("Sequence[object]", sizes))


def sizing_of(source: frontends.Source, given: GivenShapes | None = None) -> Sizing:
    """Read the sizes that are given for a model; see `with_sizes`."""
    inputs, outputs = source.interface
    return with_sizes(source.file, Sizing(inputs, outputs, {}), given)


def with_sizes(file: str, known: Sizing, given: GivenShapes | None) -> Sizing:
    """Read sizes by name of a symbolic dim, and shapes by name of an input.

    known: the inputs and outputs; its ranges hold for dims that are not given.

    A number or text under a name is the size of a dim; a sequence is the shape of an input, if there is one of that
    name, else a range.
    Raises ModelError if a name is neither, or sizes contradict each other or the model.
    """
    by_name = {spec.name: spec for spec in known.inputs}
    sizes_of: dict[str, SizeRange] = {}

    def learn(dim: str, each: SizeRange) -> None:
        first = sizes_of.setdefault(dim, each)
        if first != each:
            raise ModelError(f"{file}: dim {dim!r} is {first} and {each} in the shapes given")

    for name, sizes in (given or {}).items():
        is_shape = name in by_name and (isinstance(sizes, Sequence) and not isinstance(sizes, str))
        if is_shape or (name in by_name and name not in known.symbols):
            by_name[name] = _with_shape(file, by_name[name], sizes, learn)
        elif name in known.symbols:
            learn(name, SizeRange.of(f"dim {name!r}", sizes))
        else:
            inputs, dims = (printable(", ".join(each)) or "none" for each in (by_name, sorted(known.symbols)))
            raise ModelError(f"{file}: there is no input or symbolic dim {name!r}; inputs: {inputs}; dims: {dims}")
    sizes_of = {**known.ranges, **sizes_of}
    fixed = {name: each.most for name, each in sizes_of.items() if each.least == each.most}

    def sized(spec: Declaration) -> Declaration:
        dims = spec.dims and tuple(fixed.get(d, d) if isinstance(d, str) else d for d in spec.dims)
        return replace(spec, dims=dims)

    ranges = {name: each for name, each in sizes_of.items() if name not in fixed}
    return Sizing(tuple(map(sized, by_name.values())), tuple(map(sized, known.outputs)), ranges)


def _with_shape(file: str, spec: Declaration, given: Any, learn: Callable[[str, SizeRange], None]) -> Declaration:
    """Return an input with names for the dims without one, and learn the sizes that its shape gives."""
    if isinstance(given, str):
        given = given.split(",") if given else ()
    if not isinstance(given, Sequence):
        raise ModelError(f"{file}: the shape given for input {spec.name!r} is {given!r}, not a sequence of sizes")
    dims = spec.dims if spec.dims is not None else ("",) * len(given)
    if len(dims) != len(given):
        raise ModelError(f"{file}: input {spec.name!r} has {len(dims)} dims, the shape given has {len(given)}")
    named: list[int | str] = []
    for place, (dim, size) in enumerate(zip(dims, given, strict=True)):
        each = SizeRange.of(f"dim {place} of input {spec.name!r}", size)
        if isinstance(dim, int) and each != SizeRange(dim, dim, dim):
            raise ModelError(f"{file}: dim {place} of input {spec.name!r} is {dim} in the model, and {each} as given")
        if isinstance(dim, int):
            named.append(dim)
        else:
            symbol = dim or f"{spec.name}[{place}]"
            learn(symbol, each)
            named.append(symbol)
    return replace(spec, dims=tuple(named))
