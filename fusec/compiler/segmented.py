"""Compile a model that is split at host steps: each segment as a program, which share weights and choices."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from fusec.compiler.build_program import ModelWithHostSteps
from fusec.errors import NotOneProgramError
from fusec.execution.compile_options import CompileOptions
from fusec.execution.shape_family import ShapeFamily
from fusec.execution.simulator_backend import SimulatorBackend
from fusec.gpu import device
from fusec.ir import Graph
from fusec.passes.layout.io_layout import names
from fusec.runtime import Executable
from fusec.segments.call_values import Arrays
from fusec.segments.executable import CompileBody, SegmentedExecutable, why_not_one
from fusec.targets.target import CPU, Target

CompileGraph = Callable[[Graph, CompileOptions, ShapeFamily | None], Executable]


def segmented_executable(
    model: ModelWithHostSteps,
    options: CompileOptions,
    target: Target,
    compile_graph: CompileGraph,
    compile_body: CompileBody,
) -> SegmentedExecutable:
    """Return an executable that compiles segments when a call has their shapes. The first one is compiled now.

    compile_body: compiles the body of a loop.
    Raises NotOneProgramError for options that only one program can have: state and a lock.
    """
    for option, given in (("state", options.state), ("a lock", options.lock)):
        if given:
            why = why_not_one(model.first)
            raise NotOneProgramError(f"{model.source.file}: {option} needs one program, and the model {why}")
    families: dict[Hashable, ShapeFamily] = {}

    def compiled(graph: Graph, place: Hashable) -> Executable:
        """Compile a segment. Those after one host step differ in shapes only, so that they share their choices."""
        if place == ():
            return compile_graph(graph, _for_segment(options, graph), None)
        if place not in families:
            first_plans, transfers = options.tune == "none" and not options.simulate, not options.simulate
            families[place] = ShapeFamily(first_plans=first_plans, transfers=transfers)
            if len(families) > 1:
                families[place].weights = next(iter(families.values())).weights
        return compile_graph(graph, _for_segment(options, graph), families[place])

    if target.name == CPU:
        arrays: Arrays = SimulatorBackend(CPU)
    elif options.simulate or not device.is_present(target):
        arrays = SimulatorBackend()
    else:
        from fusec.gpu.device_arrays import DeviceArrays  # needs cupy and cudnn, which only a GPU machine must have

        arrays = DeviceArrays()
    return SegmentedExecutable(model.source, model.first, compiled, compile_body, arrays)


def require_whole(read: Graph | ModelWithHostSteps) -> Graph:
    """Return the graph of a model that is one program. Raises NotOneProgramError for a model with host steps."""
    if isinstance(read, Graph):
        return read
    raise NotOneProgramError(f"{read.source.file}: is not one program: it {why_not_one(read.first)}")


def _for_segment(options: CompileOptions, graph: Graph) -> CompileOptions:
    """Return the options with those names of inputs and outputs that the segment has."""
    if isinstance(options.channels_last, bool):
        return options
    own = {value.name for value in graph.inputs} | set(graph.output_names)
    return replace(options, channels_last=tuple(name for name in names(options.channels_last) if name in own))
