"""Check order and timing: steps in any order that the waits allow, and late blocks that read replaced state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from unittest import SkipTest

import numpy as np

from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.ir import Constant, Graph, HostArray, Value, quote
from fusec.ops import Scatter
from fusec.passes.partition import kernels_only, ordered
from fusec.passes.partition.convexity import Wiring
from fusec.reference import evaluate_node
from fusec.runtime import Executable, SimulatorBackend
from fusec.schedule.buffer_donation import CHANNELS, in_place, reads
from fusec.schedule.dependencies import Waits, waits
from fusec.schedule.multi_tensor import equal_members, multi_tensor_steps
from fusec.schedule.program import Kind, Partition, Program, body_of, single_step
from fusec.testing.case import Case, MismatchError, Property
from fusec.testing.properties.fixtures import CASE, prepared, stored_values
from fusec.testing.properties.running import same_bits

ORDERS = 1  # other orders of the steps, in each kind of memory
PLACES = 3  # elements that are computed last


class _ConcurrentMemory(SimulatorBackend):
    """A backend that plans memory for steps that run concurrently."""

    side_by_side = True


class _Reordered(Executable):
    """An executable that runs its steps in a given order, in memory that is overwritten first."""

    order: Sequence[int] | None = None

    def _execute(self, arrays: Sequence[HostArray | None]) -> None:
        if self.order is None:
            super()._execute(arrays)
            return
        self._arena[...] = 0xFF  # NaN to floats of every width
        for place, array in enumerate(arrays):
            if array is not None:
                self._feeders[place](array)
        for index in self.order:
            self._launches[index]()


def any_order_agrees(graph: Graph, case: Case = CASE) -> None:
    """Check that steps give the same bits in any order that the waits allow.

    Memory is planned once for steps in sequence and once for concurrent steps.
    """
    shared, rng = prepared(graph, case), np.random.default_rng(case.seed)
    for backend in (SimulatorBackend(), _ConcurrentMemory()):
        net = _Reordered(shared.compiled, backend)
        waiting = waits(shared.compiled.program, net.memory)
        if waiting is None:
            raise SkipTest("memory that is not the plan's")
        with np.errstate(all="ignore"):
            want = [array.copy() for array in net.run(None, shared.feeds)]
            for _ in range(ORDERS):
                net.order = _order(waiting, rng)
                got = net.run(None, shared.feeds)
                same_bits([spec.name for spec in net.outputs], got, want, f"with its steps in the order {net.order}")


def _order(waiting: Waits, rng: np.random.Generator) -> list[int]:
    """Draw an order of the steps that run, each after those it waits for."""
    left, order = [i for i, before in enumerate(waiting) if before is not None], list[int]()
    while left:
        ready = [i for i in left if set(order).issuperset(waiting[i] or ())]
        order.append(int(rng.choice(ready)))
        left.remove(order[-1])
    return order


# state -----------------------------------------------------------------------------------------------------


def state_is_read_in_time(graph: Graph, case: Case = CASE) -> None:
    """Check that steps may write new state over old state where the schedule allows it.

    Inputs are treated as state that outputs of the same type replace. An element that is computed last, when all other
    elements are already replaced, must be the same.
    """
    shared = prepared(graph, case)
    optimised = shared.optimised
    fused = fuse_steps(kernels_only(optimised), shared.compiled.figures)
    for program in (shared.compiled.program, fused, _multi_tensor_program(optimised)):
        found = in_place(program, _updates(program.graph))
        with np.errstate(all="ignore"):
            _check_late_elements(
                program, found, stored_values(program.graph, shared.feeds), np.random.default_rng(case.seed)
            )


def _updates(graph: Graph) -> dict[Value, Value]:
    """Pair inputs with outputs that could replace them; outputs computed from the input come first."""
    free = list(dict.fromkeys(v for v in graph.outputs if v.node is not None and v.literal is None and v.type.size))
    found: dict[Value, Value] = {}
    for old in graph.inputs:
        fitting = [v for v in free if v.type == old.type]
        fitting.sort(key=lambda v: v.node is None or old not in v.node.operands)
        if fitting:
            found[old] = fitting[0]
            free.remove(fitting[0])
    return found


def _multi_tensor_program(graph: Graph) -> Program:
    """Make each node a step, except ops that do the same to several inputs that are state."""
    names = dict(zip(graph.outputs, graph.output_names, strict=True))
    state = {old.name: names[new] for old, new in _updates(graph).items()}
    multi_tensor, wiring = multi_tensor_steps(graph, state), Wiring(graph)
    taken = {node for nodes in multi_tensor for node in nodes}
    steps = [Partition(nodes, Kind.KERNEL, body_of(graph, nodes)) for nodes in multi_tensor]
    steps += [single_step(graph, n) for n in graph.nodes if n not in taken and not isinstance(n.op, Constant)]
    return Program(graph, ordered(steps, wiring))


def _is_written_only(program: Program, step: Partition, old: Value, new: Value) -> bool:
    """Tell if a step writes state of another shape, of which the update is a view; it must not read the old value.

    Raises MismatchError if it reads the old value, and does more than write rows into it.
    """
    if new.type == old.type:
        return False
    writes_rows = any(isinstance(node.op, Scatter) for node in step.nodes)
    if not writes_rows and old in {reads(program, v) for v in step.inputs}:
        raise MismatchError(f"{step.signature} reads {old!r} and writes {new!r} over it in another shape")
    return True


def _check_late_elements(
    program: Program, found: Mapping[Value, Value], held: Mapping[Value, HostArray], rng: np.random.Generator
) -> None:
    """Check steps that write over state that they read, as a GPU may run them.

    Some elements are computed late, when the others are written already.
    """
    for index, step in enumerate(program.steps):
        pairs = {found[v]: v for v in step.outputs if v in found}
        _check_no_later_reads(program, index, pairs)
        pairs = {old: new for old, new in pairs.items() if not _is_written_only(program, step, old, new)}
        if not pairs or any(isinstance(node.op, CHANNELS) for node in step.nodes):
            continue  # because these read a whole channel before they write
        members = equal_members(step.nodes)
        right = _outputs(program, step, held, {})
        late = {old: right[new] for old, new in pairs.items()}
        for old, new in pairs.items():
            own = next((set(m.writes) for m in members or () if new in m.writes), set(step.outputs))
            peers = [v for v in step.outputs if v in own and v.type.shape == old.type.shape]
            mine = [o for o, n in pairs.items() if n in peers]
            for place in rng.integers(0, old.type.size, PLACES).tolist():
                at = np.unravel_index(place, old.type.shape)
                changed = dict(late)
                for each in mine:  # because the thread that computes an element has already read its operands
                    changed[each] = np.array(late[each])
                    changed[each][at] = held[each][at]
                made = _outputs(program, step, held, changed)
                for value in peers:
                    if made[value][at].tobytes() != right[value][at].tobytes():
                        raise MismatchError(
                            f"{step.signature}: element {list(map(int, at))} of {quote(value.name)} is another when it "
                            f"is computed last, with {quote(new.name)} in place of {quote(old.name)}"
                        )
        made = _outputs(program, step, held, late)
        for value in step.outputs:
            alone = all(value.type.shape != old.type.shape for old in pairs)
            if alone and made[value].tobytes() != right[value].tobytes():
                raise MismatchError(f"{step.signature}: {quote(value.name)} is another when it is computed last")


def _check_no_later_reads(program: Program, index: int, pairs: Mapping[Value, Value]) -> None:
    """Check that no output and no later step reads state that a step replaces."""
    for value in program.graph.outputs:
        if reads(program, value) in pairs:
            raise MismatchError(f"{quote(value.name)} is returned when it is replaced")
    for later in program.steps[index + 1 :]:
        for value in later.inputs:
            if reads(program, value) in pairs:
                raise MismatchError(f"{quote(value.name)} is read by {later.signature} when it is replaced")


def _outputs(
    program: Program, step: Partition, held: Mapping[Value, HostArray], changed: Mapping[Value, HostArray]
) -> dict[Value, HostArray]:
    """Compute a step's outputs from operands of which some are changed, and with them their views."""
    now: dict[Value, HostArray] = dict(changed)

    def read(value: Value) -> HostArray:
        if value not in now:
            viewed = value.node is not None and value.literal is None
            if viewed and reads(program, value) in changed:
                assert value.node is not None
                arrays = evaluate_node(value.node, [read(v) for v in value.node.operands])
                now.update(zip(value.node.results, map(np.asarray, arrays), strict=True))
            else:
                now[value] = held[value]
        return now[value]

    for node in step.nodes:
        if any(v.literal is None for v in node.results):
            arrays = evaluate_node(node, [read(v) for v in node.operands])
            now.update(zip(node.results, map(np.asarray, arrays), strict=True))
    return now


PROPERTIES_SCHEDULES: tuple[Property, ...] = (
    Property("any_order_agrees", any_order_agrees),
    Property("state_is_read_in_time", state_is_read_in_time),
)
