"""Build a Program from a model: read it, run the passes, partition the graph into steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from fusec import frontends, passes
from fusec.compiler.choose_judge import choose_judge
from fusec.compiler.compile_ahead import ProposedKernels, compiled_ahead
from fusec.diagnostics import launch_hint
from fusec.errors import ModelError
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import CompileOptions
from fusec.execution.shape_family import ShapeFamily
from fusec.gpu.autotune.cache.code_digest import candidate_code_digest
from fusec.gpu.cudnn.legality.judges import CudnnJudge, NoJudge
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.kernels import GpuFigures
from fusec.gpu.known_faster_kernels import KnownFasterKernels
from fusec.ir import BYTES, HALVES, Constant, DType, Graph, load_early
from fusec.passes.base import Options, run
from fusec.passes.layout.io_layout import insert_interface_copies
from fusec.passes.partition import kernels_only, partition
from fusec.passes.partition.concat_in_place import concat_in_place
from fusec.passes.partition.refused_ops import expand_refused
from fusec.passes.partition.strict_rounding import StrictRounding
from fusec.schedule.program import Program
from fusec.system.compile_timer import spent_on
from fusec.system.dataclass import dataclass
from fusec.targets.target import CPU, Target
from fusec.targets.target import load as load_target

if TYPE_CHECKING:
    from onnx import ModelProto

    from fusec.frontends.onnx.segmented.segments import Segment


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelWithHostSteps:
    """A model that needs values on the host, with its first segment."""

    source: frontends.Source
    first: Segment


@spent_on("the model is read")
def read_model(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    shapes: Mapping[str, Sequence[int]] | None,
) -> Graph | ModelWithHostSteps:
    """Return the graph of a model with concrete shapes, or its first segment if values are needed on the host.

    Raises ModelError if it cannot be read.
    """
    source = model if isinstance(model, frontends.Source) else frontends.Source(model)
    read = source.segments(shapes)
    _log.info("model read: %s", f"{len(read)} nodes" if isinstance(read, Graph) else "split at host steps")
    return read if isinstance(read, Graph) else ModelWithHostSteps(source, read)


@spent_on("passes and partitions")
def build_program(
    source: Graph,
    options: CompileOptions,
    target: Target,
    family: ShapeFamily | None = None,
    oracle: Oracle | None = None,
) -> Compiled:
    """Run the passes on a copy of the source, then partition it for a target. Raises ModelError if it has strings.

    oracle: the worker processes that ask cuDNN; None: the family's, or new ones.
    """
    if any(value.type.dtype is DType.STRING for value in (*source.inputs, *source.outputs)):
        raise ModelError(f"graph {source.name!r} has strings, which only the host has: compile the ONNX model itself")
    if target.name == CPU:
        return _build_for_numpy(source, options)
    pass_options = _without_rerounding(replace(options.for_passes(source), target=target), source)
    if family is not None:
        family.weights.share(source)
    graph = _run_passes(source, options, pass_options)
    if oracle is not None and oracle.device:  # a GPU of this machine will run the program
        load_constants_early(graph)
    judge = choose_judge(target, pass_options, oracle, family)
    asked = judge.within(options.budget_s) if isinstance(judge, CudnnJudge) else judge
    if pass_options.as_source:
        judge, asked = StrictRounding(judge), StrictRounding(asked)
    elif oracle is not None and oracle.device and _times_kernels(options, pass_options):
        asked = KnownFasterKernels(asked, GpuFigures.of(target))

    def partitioned(graph: Graph) -> Program:
        insert_interface_copies(graph, pass_options)
        if family is not None:
            family.weights.share(graph)
        proposed = ProposedKernels(graph, target, pass_options, dict(options.state), options.tune)
        with compiled_ahead(proposed, oracle):
            return partition(graph, asked, target, partial(options.report, "partition"), dict(options.state))

    def before_layout() -> Graph:
        return run(passes.EARLY_PASSES, source.clone(), pass_options)

    program = expand_refused(partitioned(graph), before_layout, partitioned, asked, pass_options)
    program = concat_in_place(program, asked, pass_options)
    _log.info("partitioned for %s in %s: %s", target.name, pass_options.precision, program.counts)
    compiled = Compiled(source, program, target, pass_options, judge)
    if (hint := launch_hint.launches(compiled)) is not None:
        _log.warning("%s", hint.text)
    return compiled


def load_constants_early(graph: Graph) -> None:
    """Begin to load the constants of a graph, which a GPU of this machine will run."""
    candidate_code_digest()  # it reads many files, which takes longer while other threads load weights
    load_early(node.op.literal for node in graph.nodes if isinstance(node.op, Constant))


def _times_kernels(options: CompileOptions, pass_options: Options) -> bool:
    """Tell if tuning is free to run kernels in place of cuDNN's plans."""
    return options.tune != "none" and options.lock is None and pass_options.plan_filter.is_default


def _run_passes(source: Graph, options: CompileOptions, pass_options: Options) -> Graph:
    """Run the pipeline on a copy of the source, and tell of each pass."""
    numbers = count()

    def report_pass(name: str) -> None:
        _log.debug("pass %s", name)
        options.report(f"pass {name}", next(numbers), len(passes.PIPELINE))

    graph = run(passes.PIPELINE, source.clone(), pass_options, report_pass)
    _log.info("passes: %d nodes became %d", len(source), len(graph))
    return graph


def _without_rerounding(options: Options, source: Graph) -> Options:
    """Leave out the rewrites that round values elsewhere than the model does, for rounding as in the source.

    They matter to values of 16 bits, and to floats that are rounded to integers of 8 bits.
    """
    narrow = (*HALVES, *BYTES)
    if not options.as_source or not (options.storage in HALVES or any(v.type.dtype in narrow for v in source.values())):
        return options
    return replace(options, disable=options.disable | passes.REROUNDING)


def _build_for_numpy(source: Graph, options: CompileOptions) -> Compiled:
    """Build a program of kernels in the layouts of the model, because NumPy gains nothing from others.

    Nor does it gain from packed weights, which it would unpack in each call.
    """
    pass_options = options.for_passes(source)
    pass_options = replace(pass_options, disable=pass_options.disable | {"assign_layout", "keep_packed_weights"})
    graph = _run_passes(source, options, pass_options)
    insert_interface_copies(graph, pass_options)
    return Compiled(source, kernels_only(graph), load_target(CPU), pass_options, NoJudge())
