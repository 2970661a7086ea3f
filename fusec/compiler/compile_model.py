"""Compile a model with checked options: read it, build its program, choose who runs it, prepare it for a GPU.

`compile_graph` calls the stages in order. `build_model` stops at the program.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from fusec import frontends, lockfile
from fusec.builder import Builder
from fusec.compiler.build_program import ModelWithHostSteps, build_program, read_model
from fusec.compiler.choose_judge import start_workers
from fusec.compiler.choose_target import require_runs_on_gpu, resolve_target
from fusec.compiler.faster_form import faster_form, whole_us
from fusec.compiler.file_program import FileProgram
from fusec.compiler.gpu_executable import locked_executable, tuned_executable
from fusec.compiler.segmented import require_whole, segmented_executable
from fusec.compiler.size_transfer import executable_for_size
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import CompileOptions
from fusec.execution.shape_family import ShapeFamily
from fusec.gpu import device
from fusec.gpu.cudnn.legality.equal_compilations import after_equal_ones
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.load_engines import load_engines_once
from fusec.gpu.cudnn.without_driver.deviceless import load_cudnn
from fusec.ir import Graph
from fusec.passes.base import FASTEST, ROUND_ACTIVATIONS
from fusec.runtime import Executable, SimulatorBackend
from fusec.segments.executable import AnyExecutable
from fusec.system import compile_timer
from fusec.system.dataclass import dataclass
from fusec.system.garbage import seldom_collected
from fusec.targets.target import CPU, Target

if TYPE_CHECKING:
    from onnx import ModelProto

P = ParamSpec("P")
E = TypeVar("E", bound=AnyExecutable)


@dataclass(frozen=True)
class Shared:
    """State that compilations share: `family` those of one model, `oracle` those for one target."""

    family: ShapeFamily | None = None
    oracle: Oracle | None = None


def _timed(function: Callable[P, E]) -> Callable[P, E]:
    """Record compile time by stage on the returned Executable. Meanwhile garbage is collected more seldom."""

    @functools.wraps(function)
    def timed(*args: P.args, **kwargs: P.kwargs) -> E:
        with seldom_collected(), compile_timer.opened("the rest") as spent:
            executable = function(*args, **kwargs)
        executable.spent = spent
        return executable

    return timed


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
    file = FileProgram.of(model, options, shapes) if wakes_gpu(options) and shared.family is None else None
    with device.woken(options.target, load_engines_once) if wakes_gpu(options) else nullcontext():
        source = read_model(model, shapes) if file is None else file.read()
    target = resolve_target(options.target)
    if isinstance(source, ModelWithHostSteps):

        def program(graph: Graph, options: CompileOptions, family: ShapeFamily | None) -> Executable:
            return compile_graph(graph, options, replace(shared, family=family or shared.family))

        def body(model: frontends.Source, shapes: Mapping[str, Sequence[int]]) -> AnyExecutable:
            return compile_model(model, replace(options, channels_last=False), shapes, Shared(oracle=shared.oracle))

        return segmented_executable(source, options, target, program, body)
    return compile_graph(source, options, shared, shapes)


def compile_graph(
    source: Graph | FileProgram,
    options: CompileOptions,
    shared: Shared,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Executable:
    """Compile a graph, which is always one program, or the program of a model's file."""
    target = resolve_target(options.target)
    if target.name == CPU:
        return Executable(_build(source, options, target), SimulatorBackend(CPU))

    on_gpu = not options.simulate and device.is_present(target)
    with after_equal_ones(f"{options.tune} {options.plan_filter.key}") if on_gpu else nullcontext():
        return _compiled_for(target, on_gpu, source, options, shared, shapes)


def _compiled_for(
    target: Target,
    on_gpu: bool,
    source: Graph | FileProgram,
    options: CompileOptions,
    shared: Shared,
    shapes: Mapping[str, Sequence[int]] | None,
) -> Executable:
    """Compile a graph, or the program of a model's file, for a target with cuDNN."""
    family = shared.family
    workers = start_workers(target, on_gpu, options.plan_filter, shared.oracle, family)
    build = partial(_build, source, options, target, family, workers.oracle)
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
    load_cudnn()
    if locked is not None and options.lock is not None:
        return locked_executable(locked, options.lock, options, workers)
    if family is not None and family.transfers and compiled.options.plan_filter.is_default:
        return executable_for_size(compiled, build, family, options)
    executable = tuned_executable(compiled, options, workers, family)
    if options.rounding != FASTEST or family is not None:
        return executable
    floats = replace(options, rounding="fused", disable={*options.disable, ROUND_ACTIVATIONS})
    return faster_form(executable, lambda: compile_graph(source, floats, shared, shapes), whole_us)


def _build(
    source: Graph | FileProgram,
    options: CompileOptions,
    target: Target,
    family: ShapeFamily | None = None,
    oracle: Oracle | None = None,
) -> Compiled:
    """Build a program, or take it from the cache."""

    def build(graph: Graph) -> Compiled:
        return build_program(graph, options, target, family, oracle)

    return source.compiled(target, oracle, build) if isinstance(source, FileProgram) else build(source)


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


def compile_builder(model: Builder, options: CompileOptions, shared: Shared) -> Executable:
    """Compile the graph of a Builder. Its parameters become state, and get their first values."""
    updates = {name: model.updates.get(name, "") for name in model.parameters}
    options = replace(options, state={**updates, **options.state})
    options.report("import", 0, 1)
    executable = _timed(compile_graph)(model.graph(), options, shared)
    executable.bind(**{name: array for name, array in model.parameters.items() if array is not None})
    return executable


def wakes_gpu(options: CompileOptions) -> bool:
    """Return whether a compilation with these options may need the GPU of this machine."""
    return not options.simulate and options.target != CPU
