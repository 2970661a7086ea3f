"""Check fusec's own kernels on a GPU, one by one, against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import numpy as np

from fusec.errors import ExecutionError
from fusec.execution.compilation import Compiled
from fusec.gpu.autotune.step_choices import apply_choices
from fusec.gpu.kernels import FAMILIES, Kernel
from fusec.gpu.kernels.elementwise import scatter
from fusec.ir import Graph, HostArray, Node, TensorType, Value, quote
from fusec.lowering.packing import pack, unpack
from fusec.ops import Scatter
from fusec.schedule.multi_tensor import multi_tensor_steps
from fusec.schedule.program import Kind, body_of, inputs_of, outputs_of
from fusec.system.dataclass import dataclass
from fusec.testing.case import Case, MismatchError, Trust
from fusec.testing.error_bounds.bounds import allowed, compare, execution
from fusec.testing.error_bounds.perturbed import Rounding
from fusec.testing.properties.compiling import POISONS, poisoned, require_same_bits
from fusec.testing.properties.fixtures import CASE
from fusec.testing.properties.on_device import leave_if_faulted, on_this_gpu

Buffers = dict[tuple[Value, TensorType], HostArray]
GUARD = 64  # elements after the end of each output, which no kernel may write


class Launches(Protocol):
    """A launcher of kernels on host arrays.

    It is `fusec.gpu.host_buffers.HostLauncher`, or a stand-in.
    """

    xp: Any

    def runs(self, kernel: Kernel) -> bool: ...

    def run(self, kernel: Kernel, buffers: Buffers) -> None: ...


@dataclass(frozen=True, eq=False)
class Job:
    """The nodes of a step, the outputs that others read, and the kernel that a family offers for them.

    in_order: the kernel gives the same bits every time. Others add floats by atomic operations, in any order.
    """

    family: str
    graph: Graph
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    kernel: Kernel
    in_order: bool

    def variants(self, seed: int) -> list[Kernel]:
        """Return the kernel itself, and one other variant of it if there is one."""
        others = self.kernel.others
        return [replace(self.kernel, others=()), *(others[seed % len(others) :][:1] if others else ())]


def kernels_agree(graph: Graph, case: Case = CASE) -> None:
    """Check that each kernel that could run a step, and one other variant of it, computes what the step means.

    Everything that lowers is legal, and a kernel is tested also for steps that cuDNN would run. The reference
    computes the inputs. As in `device_agrees`, NaN is not checked, and a memory fault ends the process.
    """
    shared, launches = on_this_gpu(graph, case, "lowers"), _launches()
    rounding, seen = execution(case.options.tensor_cores, device=True), set[str]()
    try:
        for job in jobs(shared.compiled):
            for variant in job.variants(case.seed):
                if variant.launches and variant.key not in seen and launches.runs(variant):
                    seen.add(variant.key)
                    kernel_agrees(replace(job, kernel=variant), shared.values, rounding, launches)
    except ExecutionError as error:
        leave_if_faulted(error, launches)
        raise


def jobs(compiled: Compiled) -> Iterator[Job]:
    """Yield the steps of a program that a kernel can run, each with the first family that offers one.

    No case asks for updates of state, so every output is treated as new state to reach these kernels, too.
    """
    program, graph = compiled.program, compiled.graph
    steps = apply_choices(program, {}, compiled.figures, compiled.options.as_source).steps
    state = {f" {name}": name for name in graph.output_names} | {v.name: "" for v in graph.inputs}
    for nodes in (*(step.nodes for step in steps if step.kind is not Kind.VIEW), *multi_tensor_steps(graph, state)):
        outputs = outputs_of(nodes)
        if any(v.type.dtype.is_narrow for v in (*inputs_of(nodes), *outputs)):
            continue  # whose buffers are packed bytes; `device_agrees` runs these steps
        found = ((family.__name__, family(nodes, outputs, compiled.figures)) for family in FAMILIES)
        name, kernel = next(((name, kernel) for name, kernel in found if kernel is not None), ("", None))
        if kernel is not None:
            in_order = all(scatter.has_fixed_order(n, compiled.figures) for n in nodes if isinstance(n.op, Scatter))
            yield Job(name, graph, nodes, outputs, kernel, in_order)


def kernel_agrees(job: Job, values: Mapping[Value, HostArray], rounding: Rounding, launches: Launches) -> None:
    """Raise MismatchError unless a kernel writes all of its outputs, nothing else, and the right numbers.

    values: exact values of the graph, by which inputs and right outputs are known.
    launches: runs a kernel over buffers.
    """
    what, results = f"{job.family}: the kernel for {job.kernel.name}", list[dict[str, HostArray]]()
    for poison in POISONS:
        buffers = _buffers(job, values, poison)
        before = {key: buffer.tobytes() for key, buffer in buffers.items()}
        launches.run(job.kernel, buffers)
        written = next((v for v, t in before if v not in job.outputs and buffers[v, t].tobytes() != before[v, t]), None)
        if written is not None:
            raise MismatchError(f"{what}: {quote(written.name)}, an input, was written", oracle=Trust.SIMULATOR)
        results.append({v.name: _result(buffers[v, v.type], v, poison, what) for v in job.outputs if v.type.size})
    first, second = results
    types = {v.name: v.type.dtype for v in job.outputs}
    for name, array in first.items() if job.in_order else ():
        require_same_bits(what, types[name], name, (array, second[name]))
    body = body_of(job.graph, job.nodes)
    feeds = {v.name: values[v] for v in inputs_of(job.nodes) if v.literal is None}
    got = {v.name: first.get(v.name, values[v]) for v in job.outputs}
    wanted = [allowed(body, feeds, rounding)]
    for one in (got, got | second) if not job.in_order else (got,):
        compare({name: one[name] for name in body.output_names}, wanted, what)


def _buffers(job: Job, values: Mapping[Value, HostArray], poison: tuple[float, int]) -> Buffers:
    """Make flat buffers for a kernel's arguments: operands packed, outputs filled with poison, with a guard after."""
    buffers: Buffers = {}
    for argument in (a for launch in job.kernel.launches for a in launch.arguments):
        value, type = argument.value, argument.type
        if value is None or type is None or (value, type) in buffers:  # the launcher provides scratch memory
            continue
        if value in job.outputs:
            buffers[value, type] = poisoned(type.span + GUARD, type.dtype, *poison)
        else:
            array = values[value] if value.literal is None else value.literal.array
            buffers[value, type] = pack(np, array, type).copy()
    return buffers


def _result(buffer: HostArray, value: Value, poison: tuple[float, int], what: str) -> HostArray:
    """Take an output out of its buffer.

    Raises MismatchError if memory between or after its elements was written.
    """
    elements = unpack(buffer, value.type)
    result = elements.copy()
    elements[...] = poisoned(1, value.type.dtype, *poison)[0]
    if buffer.tobytes() != poisoned(buffer.size, value.type.dtype, *poison).tobytes():
        raise MismatchError(f"{what}: writes memory that is not of {quote(value.name)}", oracle=Trust.SIMULATOR)
    return result


@cache
def _launches() -> Launches:
    from fusec.gpu.host_buffers import HostLauncher  # needs cupy, which only a GPU machine must have

    return HostLauncher()
