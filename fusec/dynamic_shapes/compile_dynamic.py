"""Compile a model for all its input shapes: `fusec.compile_dynamic`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fusec import frontends
from fusec.compiler.choose_target import resolve_target
from fusec.compiler.compile_model import Shared, compile_model
from fusec.dynamic_shapes.executable import MAX_SHAPES, DynamicExecutable
from fusec.dynamic_shapes.size_ranges import GivenShapes, sizing_of
from fusec.dynamic_shapes.sizing import Shapes, Sizing
from fusec.errors import FusecError
from fusec.execution.compile_options import CompileOptions, Progress
from fusec.execution.shape_family import ShapeFamily
from fusec.frontends.custom_ops import CustomOp
from fusec.gpu import device
from fusec.ir import Graph
from fusec.passes.layout.io_layout import names, require_known
from fusec.plans.plan_filter import DEFAULT_MODES, Engines, Names
from fusec.runtime import SimulatorBackend
from fusec.segments.executable import AnyExecutable
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class DynamicOptions:
    """Options of `compile_dynamic` that `compile` does not have."""

    max_shapes: int = MAX_SHAPES
    buckets: Mapping[str, Sequence[int]] | None = None
    share_kernels: bool = False
    tune_each: bool = False


def compile_dynamic(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    *,
    target: str = "auto",
    precision: str = "fp32",
    shapes: GivenShapes | None = None,
    constants: Mapping[str, Any] | None = None,
    custom_ops: Mapping[str, Callable[..., Any] | CustomOp] | None = None,
    tune: str = "quick",
    budget: float = float("inf"),
    disable: Collection[str] = (),
    rounding: str = "fused",
    deterministic: bool = False,
    heuristics: Names = DEFAULT_MODES,
    engines: Engines = (),
    workspace_limit: int | None = None,
    channels_last: bool | Collection[str] = False,
    progress: Progress | None = None,
    max_shapes: int = MAX_SHAPES,
    buckets: Mapping[str, Sequence[int]] | None = None,
    share_kernels: bool = False,
    tune_each: bool = False,
    simulate: bool = False,
) -> DynamicExecutable:
    """Return an executable for all input shapes of a model. Nothing is compiled yet.

    fusec compiles one program per set of input shapes, the first time it sees them. Parameters that are not listed
    here are those of `compile`.

    shapes: sizes and ranges, as for `compile`. Dims without one may have any size.
    max_shapes: number of programs to cache, those used last.
    buckets: sizes to compile for, by name of a symbolic dim. A smaller size is padded to the next one. That needs a
        proof that no row of the results depends on another row; a call raises ModelError if there is none.
    share_kernels: on a GPU, let cuDNN compile each kernel once for all sizes, so that a new size compiles none.
    tune_each: time plans and kernels for each size. By default a size within a factor of 4 of a tuned size reuses its
        choices, which takes tenths of a second.
    simulate: run in simulation even if the target's GPU is present.

    Raises ModelError if the model cannot be read.
    """
    options = CompileOptions(
        target=target,
        precision=precision,
        tune=tune,
        budget_s=budget,
        disable=disable,
        rounding=rounding,
        deterministic=deterministic,
        heuristics=heuristics,
        engines=engines,
        workspace_limit=workspace_limit,
        channels_last=channels_last,
        simulate=simulate,
        progress=progress,
    )
    more = DynamicOptions(max_shapes, buckets, share_kernels, tune_each)
    source = read_source(model, constants, custom_ops)
    return dynamic_executable(source, options, sizing_of(source, shapes), Shared(), more)


def dynamic_executable(
    source: frontends.Source, options: CompileOptions, sizing: Sizing, shared: Shared, more: DynamicOptions
) -> DynamicExecutable:
    """Return an executable without programs yet, which share one family."""
    if more.max_shapes < 1:
        raise FusecError(f"max_shapes is {more.max_shapes}, but must be 1 or more")
    if options.state or options.lock is not None:
        given = "state" if options.state else "lock"
        raise FusecError(f"{given} needs one size for each dim, because it is for one program")
    if not isinstance(options.channels_last, bool):
        require_known([spec.name for specs in source.interface for spec in specs], names(options.channels_last))
    family = shared.family or ShapeFamily(
        share_kernels=more.share_kernels,
        first_plans=options.tune == "none" and not options.simulate,
        transfers=not more.tune_each and not options.simulate,
        more_sizes=any(not isinstance(d, int) for spec in sizing.inputs for d in spec.dims or (None,)),
    )

    def compiled(shapes: Shapes) -> AnyExecutable:
        return compile_model(source, options, shapes, Shared(family, shared.oracle))

    on_gpu = not options.simulate and device.is_present(resolve_target(options.target))
    place = (device.device_name() if on_gpu else None) or SimulatorBackend.name
    return DynamicExecutable(source, compiled, place, max_shapes=more.max_shapes, buckets=more.buckets, sizing=sizing)


def read_source(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    constants: Mapping[str, Any] | None,
    custom_ops: Mapping[str, Callable[..., Any] | CustomOp] | None,
) -> frontends.Source:
    """Read a model once, for any shapes."""
    bound = frontends.bind(model, constants, custom_ops)
    return bound if isinstance(bound, frontends.Source) else frontends.Source(bound)
