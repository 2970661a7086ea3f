"""The whole way from a model to something that runs; read this first.

model → Graph → passes → Graph → partition → Program → (lowered) → Executable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from fusec import frontends, passes
from fusec.compiled import Compiled
from fusec.errors import FusecError, TargetError
from fusec.gpu import device
from fusec.gpu.judge import CudnnJudge
from fusec.gpu.oracle import Oracle
from fusec.ir import Graph
from fusec.passes.base import PRECISIONS, Options, run
from fusec.passes.partition import partition
from fusec.runtime import Executable, SimulatorBackend
from fusec.target import Target, load

if TYPE_CHECKING:
    from onnx import ModelProto

Model = "str | os.PathLike[str] | bytes | ModelProto | Graph"
Progress = Callable[[str, int, int], None]  # stage, done, total
TUNE_LEVELS = ("none", "quick")
DEFAULT_TARGET = "h200"  # what `auto` stands for on a machine without a GPU


def compile(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph,
    *,
    target: str = "auto",
    precision: str = "fp32",
    shapes: Mapping[str, Sequence[int]] | None = None,
    tune: str = "quick",
    disable: Collection[str] = (),
    progress: Progress | None = None,
) -> Executable:
    """Compile a model for a GPU and return it ready to call.

    model: an ONNX path, ONNX bytes, a ModelProto, the text form, or a Graph (which is not changed).
    target: `auto` (the GPU of this machine, or else an H200 in simulation) or one of `fusec targets`.
        It runs on the GPU if there is one of that kind, else through the simulator.
    precision: fp32, tf32, fp16 or bf16, all with fp32 accumulation.
    shapes: concrete shapes, by input name, for inputs with symbolic dims.
    tune: `quick` times cuDNN's plans on the GPU and keeps the fastest, `none` takes its first; no
        effect in simulation.
    disable: names of passes and rewrite rules to leave out.
    Raises ModelError, TargetError.
    """
    if tune not in TUNE_LEVELS:
        raise FusecError(f"tune is one of {', '.join(TUNE_LEVELS)}, not {tune!r}")
    compiled = build(model, target=target, precision=precision, shapes=shapes, disable=disable, progress=progress)
    if device.is_present(compiled.target):
        _require_types_of_the_device(compiled.graph)
        from fusec.gpu.backend import CudnnBackend  # needs cupy and cudnn, which only a GPU machine must have

        return Executable(compiled, CudnnBackend(tune, progress))
    return Executable(compiled, SimulatorBackend())


def build(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph,
    *,
    target: str = "auto",
    precision: str = "fp32",
    shapes: Mapping[str, Sequence[int]] | None = None,
    disable: Collection[str] = (),
    progress: Progress | None = None,
) -> Compiled:
    """The same up to the program: nothing is prepared to run. See `compile`."""
    if precision not in PRECISIONS:
        raise FusecError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
    unknown = sorted(set(disable) - passes.names())
    if unknown:
        raise FusecError(f"no pass or rule is named {', '.join(unknown)}; `python -m fusec.passes` lists them")
    report = progress or (lambda stage, done, total: None)
    options = Options(precision, frozenset(disable))
    goal = resolve_target(target)
    report("import", 0, 1)
    source = frontends.load(model, shapes)
    pipeline = passes.PIPELINE
    done = iter(range(len(pipeline)))
    graph = run(pipeline, source.clone(), options, lambda name: report(f"pass {name}", next(done), len(pipeline)))
    judge = CudnnJudge(Oracle(goal, device=device.is_present(goal)), options.tensor_cores)
    program = partition(graph, judge, goal, lambda count, total: report("partition", count, total))
    return Compiled(source, program, goal, options, judge)


def _require_types_of_the_device(graph: Graph) -> None:
    """CuPy has no type of fewer than 8 bits, and no float of 8."""
    narrow = next((v for v in graph.values() if v.type.dtype.is_narrow), None)
    if narrow is not None:
        raise TargetError(f"{narrow!r}: {narrow.type.dtype.value} runs in simulation only, not on a GPU")


def resolve_target(name: str) -> Target:
    """The target of that name; `auto` is the GPU of this machine, or an H200 where there is none."""
    if name != "auto":
        return load(name)
    return device.detect() or load(DEFAULT_TARGET)
