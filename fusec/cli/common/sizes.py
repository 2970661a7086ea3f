"""Compile a model for several sizes of its symbolic dims, as `--shape` and `--bucket` give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fusec.cli.common import options as cli_options
from fusec.cli.common import output
from fusec.cli.common.request import Request
from fusec.errors import FusecError
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from fusec.dynamic_shapes.padding import Padding
    from fusec.dynamic_shapes.sizing import Sizing
    from fusec.execution.compilation import Compiled
    from fusec.frontends import Source

# Imports that only a command needs are inside functions: see commands.py.


@dataclass(frozen=True)
class Sized:
    """A model with the ranges of its dims, and the buckets to which sizes are padded."""

    source: Source
    sizing: Sizing
    padding: Padding


def ranged(request: Request, buckets: Sequence[str], locked: bool) -> Sized | None:
    """Return the ranges of `--shape`; None if each dim has one size.

    Raises FusecError if a dim has no size, there are buckets without a range, or a lock is given.
    """
    from fusec.dynamic_shapes.padding import Padding
    from fusec.frontends import Source

    known = cli_options.buckets_of(buckets)
    model, sizing = (None, None) if request.is_compiled else request.sizing()
    if sizing is None or not sizing.ranges or not isinstance(model, Source):
        if known:
            raise FusecError(
                f"--bucket {buckets[0]}: give the range of the dim, as in --shape {next(iter(known))}=1..32"
            )
        return None
    if locked:
        raise FusecError("--locked needs one size for each dim, because a lock is for one program")
    if sizing.likely is None:
        open_dims = [d for d in sizing.symbols if d not in sizing.ranges]
        raise FusecError(f"{request.model}: give a size or range of each dim: --shape {open_dims[0]}=…")
    return Sized(model, sizing, Padding(model, sizing, known, cached=4096))


def build(
    request: Request, sized: Sized, targets: Sequence[str], report: output.Report, all_sizes: bool
) -> list[Compiled]:
    """Compile the model for each target, for the likely sizes or for all that a file holds, the likely ones first."""
    from fusec import driver
    from fusec.dynamic_shapes.save_shapes import representatives
    from fusec.execution.shape_family import ShapeFamily

    shapes = representatives(sized.sizing, sized.padding)
    built: list[Compiled] = []
    families = {name: ShapeFamily() for name in targets}
    with output.without_cudnn_warning():
        for each in shapes if all_sizes else shapes[:1]:
            for name, family in families.items():
                options = replace(request.options, target=name, progress=report)
                built.append(driver.build_model(sized.source, options, each, driver.Shared(family)))
    return built


def shapes_of(compiled: Sequence[Compiled]) -> list[dict[str, list[int]]]:
    """Return the input shapes of the programs, without duplicates."""
    found = [{v.name: list(v.type.shape) for v in each.source.inputs} for each in compiled]
    return [each for place, each in enumerate(found) if each not in found[:place]]
