"""Compile a model to an Executable; read this file first.

The stages are: options → Graph → passes → partition → Program → backend → Executable. `compile` checks the options and
reads the sizes. `compile_graph` in `fusec/compiler/compile_model.py` calls the other stages, each a file next to it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from fusec import frontends
from fusec.builder import Builder
from fusec.compiler.choose_target import resolve_target
from fusec.compiler.compile_model import Shared, build_model, compile_builder, compile_model, wakes_gpu
from fusec.compiler.load_file import load_artifact
from fusec.diagnostics import launch_hint
from fusec.dynamic_shapes.compile_dynamic import DynamicOptions, compile_dynamic, dynamic_executable, read_source
from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.dynamic_shapes.load_shapes import load
from fusec.dynamic_shapes.size_ranges import GivenShapes, read_sizes, sizing_of
from fusec.dynamic_shapes.sizing import Shapes
from fusec.errors import ManyLaunchesWarning, ModelError
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import CompileOptions, Progress
from fusec.execution.shape_family import ShapeFamily
from fusec.frontends.custom_ops import CustomOp
from fusec.gpu import device
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.load_engines import load_engines_once
from fusec.ir import Graph
from fusec.plans.plan_filter import DEFAULT_MODES, Engines, Names
from fusec.runtime import Executable
from fusec.segments.executable import AnyExecutable

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
        On a GPU, the program of a file is cached on disk (docs/artifacts.md).
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
        this one stops. What was not asked about runs unfused. 0 times nothing, and asks without a limit.
    disable: names of passes and rewrite rules to leave out.
    rounding: `fused`: inside a step, 16-bit values stay in fp32 from op to op. `source`: each value is rounded to its
        storage type wherever the model rounds it; fusions and rewrites that would change that are left out.
        `fastest`: as `fused`, and on a GPU a quantised model may compute in floats, without rounding activations to 8
        bits, where the whole is faster so. Short sums of fp8 may be added with fewer bits.
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
        return compile_builder(model, options, Shared(family, oracle))
    shared = Shared(family, oracle)
    if not (shapes or buckets):
        return _warned(compile_model(frontends.bind(model, constants, custom_ops), options, None, shared))
    with device.woken(options.target, load_engines_once) if wakes_gpu(options) else nullcontext():
        source = read_source(model, constants, custom_ops)
    sizing = sizing_of(source, shapes) if buckets else read_sizes(source, shapes)
    if sizing is None:
        return _warned(compile_model(source, options, cast("Shapes", shapes), shared))
    if not (sizing.ranges or buckets):
        return _warned(compile_model(source, options, sizing.known_shapes, shared))
    dynamic = dynamic_executable(source, options, sizing, shared, DynamicOptions(buckets=buckets))
    if sizing.likely is not None:
        dynamic.program()
    return dynamic


def _warned(executable: AnyExecutable) -> AnyExecutable:
    """Return an executable, with a ManyLaunchesWarning if its model became many times as many launches."""
    if (
        isinstance(executable, Executable)
        and executable.compiled.program.launches >= launch_hint.MANY_LAUNCHES
        and launch_hint.may_have_grown(executable.compiled.program)
    ):
        hint = launch_hint.launches(executable.compiled)
        if hint is not None and hint.grew:
            warnings.warn(hint.text, ManyLaunchesWarning, stacklevel=3)
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
