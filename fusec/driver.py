"""Compile a model to an Executable; read this file first.

The stages are: model → Graph → passes → partition → Program → back end → Executable.
`compile_model` calls them in that order; `fusec/compiler` has a file for each.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from fusec import frontends, lockfile
from fusec.builder import Builder
from fusec.compiler.build_program import CutModel, build_program, read_model
from fusec.compiler.choose_judge import start_workers
from fusec.compiler.choose_target import require_runs_on_gpu, resolve_target
from fusec.compiler.gpu_executable import locked_executable, tuned_executable
from fusec.compiler.load_file import load_artifact
from fusec.compiler.segmented import require_whole, segmented_executable
from fusec.compiler.size_transfer import executable_for_size
from fusec.diagnostics import hints
from fusec.dynamic_shapes.executable import MAX_SHAPES, DynamicExecutable
from fusec.dynamic_shapes.saved_shapes import load
from fusec.dynamic_shapes.size_ranges import GivenShapes, read_sizes, sizing_of
from fusec.dynamic_shapes.sizing import Shapes, Sizing
from fusec.errors import FusecError, ManyLaunchesWarning, ModelError
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import CompileOptions, Progress
from fusec.execution.shape_family import ShapeFamily
from fusec.frontends.custom_ops import CustomOp
from fusec.gpu import device
from fusec.gpu.cudnn.legality import Oracle
from fusec.ir import Graph
from fusec.passes.layout.io_layout import names, require_known
from fusec.plans.plan_filter import DEFAULT_MODES, Engines, Names
from fusec.runtime import Executable, SimulatorBackend
from fusec.segments.executable import AnyExecutable
from fusec.system import compile_timer
from fusec.targets.target import CPU

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = [
    "AnyExecutable",
    "CompileOptions",
    "Progress",
    "Shared",
    "build",
    "build_model",
    "compile",
    "compile_dynamic",
    "compile_model",
    "load",
    "load_artifact",
    "resolve_target",
]

P = ParamSpec("P")
E = TypeVar("E", bound=AnyExecutable)


@dataclass(frozen=True)
class Shared:
    """State that compilations share: `family` those of one model, `oracle` those for one target."""

    family: ShapeFamily | None = None
    oracle: Oracle | None = None


def _timed(function: Callable[P, E]) -> Callable[P, E]:
    """Record compile time by stage on the returned Executable."""

    @functools.wraps(function)
    def timed(*args: P.args, **kwargs: P.kwargs) -> E:
        with compile_timer.opened("the rest") as spent:
            executable = function(*args, **kwargs)
        executable.spent = spent
        return executable

    return timed


def compile(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source | Builder,
    *,
    target: str = "auto",
    precision: str = "fp32",
    shapes: GivenShapes | None = None,
    buckets: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    custom_ops: Mapping[str, Callable[..., Any] | CustomOp] | None = None,
    state: Mapping[str, str] | None = None,
    tune: str = "quick",
    budget: float = float("inf"),
    disable: Collection[str] = (),
    rounding: str = "fused",
    deterministic: bool = False,
    heuristics: Names = DEFAULT_MODES,
    engines: Engines = (),
    workspace_limit: int | None = None,
    channels_last: bool | Collection[str] = False,
    lock: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    family: ShapeFamily | None = None,
    simulate: bool = False,
    oracle: Oracle | None = None,
) -> AnyExecutable | DynamicExecutable:
    """Compile a model for a GPU and return it ready to call.

    A model that needs values on the host is a SegmentedExecutable, which compiles what follows when it is called.

    model: an ONNX path, ONNX bytes, a ModelProto, the text form, a Graph (which is not changed), or a Builder.
    target: `auto` (the GPU of this machine, or else an H200 in simulation) or one of `fusec targets`.
        The program runs on the GPU if this machine has that model, else in the simulator. `cpu` runs op by op in NumPy
        and never asks cuDNN; it is meant for training on a machine without a GPU. If cuDNN is not installed, fusec's
        rules alone say what fuses, with a CudnnNotAskedWarning.
    precision: fp32, tf32, fp16 or bf16, all with fp32 accumulation.
    shapes: shapes by name of an input, or sizes by name of a symbolic dim: `{"x": (1, 3, 224, 224)}`, `{"batch": 8}`.
        A size may be a range, from least to largest, with the likely size between: `"1..32"`, `"1..8..32"`, or for a
        dim also `(1, 32)`, `(1, 8, 32)`. With a range the result is a DynamicExecutable. It has the program of the
        likely sizes, and compiles others when a call has them.
    buckets: sizes to compile for, by name of a symbolic dim; the result is a DynamicExecutable. See `compile_dynamic`.
    constants: values of inputs, by name, that the program is compiled for; they are no inputs of the executable.
        Arrays have the type of the input; Python numbers and lists take it.
    custom_ops: Python functions for ONNX ops that fusec does not know, by domain and name:
        `{"my.domain::Op": function}`. A function takes an array for each operand and the attributes as keywords, and
        returns an array or a tuple of them. The model is split there: the function runs between two programs, on NumPy
        arrays, or with `CustomOp(function, on_device=True)` on the device's.
    state: inputs that stay on the device between calls (`Executable.bind`, `step`). Each has the name of the output
        that replaces it after a call, or an empty name. The state of a Builder is its parameters.
    tune: `quick` times the likely plans of cuDNN on the GPU and takes the fastest, `full` times all, `none` takes
        cuDNN's first; it has no effect in simulation. Choices are cached on disk.
    budget: seconds for asking cuDNN which ops fuse, and as many for timing plans; the next compilation continues where
        this one stops. What was not asked about runs as kernels. 0 times nothing, and asks without a limit.
    disable: names of passes and rewrite rules to leave out.
    rounding: `fused`: inside a step, 16-bit values stay in fp32 from op to op. `source`: each value is rounded to its
        storage type wherever the model rounds it; fusions and rewrites that would change that are left out.
    deterministic: every call gives the same bits for the same inputs. Plans that add in no fixed order are left out.
        FusecError is raised for an op that has no deterministic kernel on a GPU.
    heuristics: modes of cuDNN's heuristics whose plans are listed: `A`, `B`, `fallback`, one or several.
    engines: numbers of cuDNN's engines to insist on, `"45,1"`, or to leave out, `"-0,-11"`. A step without a plan of
        another engine runs as a kernel of fusec.
    workspace_limit: the most bytes of scratch memory that a plan of cuDNN or cuBLASLt may need; None: all free memory.
    channels_last: names of inputs and outputs that use NHWC memory (N, spatial dims, C). Their shapes stay N, C,
        spatial dims. True: all of rank 4 and 5 but state. An input in another memory order is copied into this one.
    lock: a `fusec.lock`. Its plans are taken and nothing is timed. CheckError is raised if the lock has no entry for a
        step, or cuDNN does not offer the plan it names.
    progress: called with the stage, and with how many of how many parts of it are done.
    family: shares constants, workers and choices with programs of the same model for other input shapes.
    simulate: run in simulation, also if the target's GPU is present.
    oracle: worker processes that ask cuDNN for many models of one target; None: new ones for this model.
    `Executable.spent` holds compile time by stage. Raises ModelError, TargetError. Warns with ManyLaunchesWarning of a
    program with 200 launches or more that are at least three times as many as the model's nodes.
    """
    options = CompileOptions(
        target=target,
        precision=precision,
        state=state or {},
        tune=tune,
        budget_s=budget,
        disable=disable,
        rounding=rounding,
        deterministic=deterministic,
        heuristics=heuristics,
        engines=engines,
        workspace_limit=workspace_limit,
        channels_last=channels_last,
        lock=lock,
        simulate=simulate,
        progress=progress,
    )
    if isinstance(model, Builder):
        if constants:
            raise ModelError("a Builder takes no constants: build it with `Builder.constant` in place of the input")
        if custom_ops:
            raise ModelError("a Builder takes no custom_ops, which are for ONNX models")
        return _compile_builder(model, options, Shared(family, oracle))
    shared = Shared(family, oracle)
    if not (shapes or buckets):
        return _warned(compile_model(frontends.bind(model, constants, custom_ops), options, None, shared))
    with device.woken(options.target) if _wakes_gpu(options) else nullcontext():
        source = _source(model, constants, custom_ops)
    sizing = sizing_of(source, shapes) if buckets else read_sizes(source, shapes)
    if sizing is None:
        return _warned(compile_model(source, options, cast("Shapes", shapes), shared))
    if not (sizing.ranges or buckets):
        return _warned(compile_model(source, options, sizing.known_shapes, shared))
    dynamic = _dynamic(source, options, sizing, shared, DynamicOptions(buckets=buckets))
    if sizing.likely is not None:
        dynamic.program()
    return dynamic


def _warned(executable: AnyExecutable) -> AnyExecutable:
    """Return an executable, with a ManyLaunchesWarning if its model became many times as many launches."""
    if isinstance(executable, Executable) and executable.compiled.program.launches >= hints.MANY_LAUNCHES:
        hint = hints.launches(executable.compiled)
        if hint is not None and hint.grew:
            warnings.warn(hint.text, ManyLaunchesWarning, stacklevel=3)
    return executable


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

    Raises ModelError: when the model cannot be read.
    """
    options = CompileOptions(
        target=target,
        precision=precision,
        tune=tune,
        budget_s=budget,
        disable=disable,
        deterministic=deterministic,
        heuristics=heuristics,
        engines=engines,
        workspace_limit=workspace_limit,
        channels_last=channels_last,
        simulate=simulate,
        progress=progress,
    )
    more = DynamicOptions(max_shapes, buckets, share_kernels, tune_each)
    source = _source(model, constants, custom_ops)
    return _dynamic(source, options, sizing_of(source, shapes), Shared(), more)


@dataclass(frozen=True)
class DynamicOptions:
    """Options of `compile_dynamic` that `compile` does not have."""

    max_shapes: int = MAX_SHAPES
    buckets: Mapping[str, Sequence[int]] | None = None
    share_kernels: bool = False
    tune_each: bool = False


def _dynamic(
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


@_timed
def compile_model(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    options: CompileOptions,
    shapes: Mapping[str, Sequence[int]] | None = None,
    shared: Shared | None = None,
) -> AnyExecutable:
    """Compile a model with checked options. See `compile`, whose keywords become the options."""
    shared = shared or Shared()
    options.report("import", 0, 1)
    with device.woken(options.target) if _wakes_gpu(options) else nullcontext():
        source = read_model(model, shapes)
    target = resolve_target(options.target)
    if isinstance(source, CutModel):

        def program(graph: Graph, options: CompileOptions, family: ShapeFamily | None) -> Executable:
            return compile_graph(graph, options, replace(shared, family=family or shared.family))

        def body(model: frontends.Source, shapes: Mapping[str, Sequence[int]]) -> AnyExecutable:
            return compile_model(model, replace(options, channels_last=False), shapes, Shared(oracle=shared.oracle))

        return segmented_executable(source, options, target, program, body)
    return compile_graph(source, options, shared, shapes)


def compile_graph(
    source: Graph, options: CompileOptions, shared: Shared, shapes: Mapping[str, Sequence[int]] | None = None
) -> Executable:
    """Compile a graph, which is always one program."""
    target, family = resolve_target(options.target), shared.family
    if target.name == CPU:
        return Executable(build_program(source, options, target), SimulatorBackend(CPU))

    on_gpu = not options.simulate and device.is_present(target)
    workers = start_workers(target, on_gpu, options.plan_filter, shared.oracle, family)
    build = partial(build_program, source, options, target, family, workers.oracle)
    if family is not None and family.transfers:
        family.prefetch_plans(shapes or {})
    compiled = build()
    locked = None
    if options.lock is not None:
        builds = (lambda graph, choice: True) if on_gpu else None  # on a GPU, preparing the program checks its plans
        locked = lockfile.apply(lockfile.read(os.fspath(options.lock)), compiled, builds)
        compiled = locked.compiled

    if not on_gpu:
        return Executable(compiled, SimulatorBackend(), None if family is None else family.weights)
    require_runs_on_gpu(compiled)
    if locked is not None and options.lock is not None:
        return locked_executable(locked, options.lock, options, workers)
    if family is not None and family.transfers and compiled.options.plan_filter.is_default:
        return executable_for_size(compiled, build, family, options)
    return tuned_executable(compiled, options, workers, family)


def _source(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    constants: Mapping[str, Any] | None,
    custom_ops: Mapping[str, Callable[..., Any] | CustomOp] | None,
) -> frontends.Source:
    """Read a model once, for any shapes."""
    bound = frontends.bind(model, constants, custom_ops)
    return bound if isinstance(bound, frontends.Source) else frontends.Source(bound)


def _wakes_gpu(options: CompileOptions) -> bool:
    return not options.simulate and options.target != CPU


def _compile_builder(model: Builder, options: CompileOptions, shared: Shared) -> Executable:
    """Compile the graph of a Builder. Its parameters become state, and get their first values."""
    updates = {name: model.updates.get(name, "") for name in model.parameters}
    options = replace(options, state={**updates, **options.state})
    options.report("import", 0, 1)
    executable = _timed(compile_graph)(model.graph(), options, shared)
    executable.bind(**{name: array for name, array in model.parameters.items() if array is not None})
    return executable


def build(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    *,
    target: str = "auto",
    precision: str = "fp32",
    shapes: Mapping[str, Sequence[int]] | None = None,
    disable: Collection[str] = (),
    rounding: str = "fused",
    channels_last: bool | Collection[str] = False,
    progress: Progress | None = None,
    family: ShapeFamily | None = None,
    state: Mapping[str, str] | None = None,
    oracle: Oracle | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile a model up to its program; nothing is prepared to run. See `compile`."""
    options = CompileOptions(
        target=target,
        precision=precision,
        state=state or {},
        disable=disable,
        rounding=rounding,
        channels_last=channels_last,
        progress=progress,
    )
    return build_model(frontends.bind(model, constants), options, shapes, Shared(family, oracle))


def build_model(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    options: CompileOptions,
    shapes: Mapping[str, Sequence[int]] | None = None,
    shared: Shared | None = None,
) -> Compiled:
    """Compile a model up to its program, with checked options. See `compile_model`."""
    shared = shared or Shared()
    target = resolve_target(options.target)
    options.report("import", 0, 1)
    return build_program(require_whole(read_model(model, shapes)), options, target, shared.family, shared.oracle)
