"""Fuse steps into one kernel, which saves launches and memory traffic.

Steps that cuDNN does not run are fused with each other and with neighbouring pointwise steps of cuDNN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusec.gpu.autotune.fusion import fusion_proposals
from fusec.gpu.kernels import GpuFigures, Kernel, find
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.gpu.kernels.product.integer_product import uses_no_tensor_cores
from fusec.ir import DType, Node, Value
from fusec.ops import PackedMatMul
from fusec.passes.partition import ordered
from fusec.passes.partition.convexity import SEARCH_LIMIT, Wiring
from fusec.schedule.program import Kind, Partition, Program, body_of, outputs_of

MAX_NODES = 48  # of one kernel: compile time grows faster than that
# Fused, the pointwise ops of a small tensor run again for each element that it is broadcast to. Up to this number of
# elements for each thread of a full GPU, that is cheaper than a launch.
MAX_REPEATED = 8


def fuse_steps(program: Program, figures: GpuFigures, products: bool = False) -> Program:
    """Fuse steps wherever one kernel runs them all.

    figures: figures of the GPU that the program is for
    products: fuse steps with products, too; `candidate_times` times the kernel against the steps it replaces
    """
    wiring = Wiring(program.graph)
    if not products and not any(step.kind is Kind.KERNEL for step in program.steps):
        return program
    groups = _Groups(program.steps, wiring, figures, products)
    for number in range(len(program.steps)) if products else ():
        groups.extend_with_products(number)
    for number in range(len(program.steps)):
        groups.extend(number)
    steps: list[Partition] = []
    for number, step in enumerate(program.steps):
        members = groups.members[number]
        if len(members) == 1 and groups.owner[number] == number:
            steps.append(step)
        elif groups.owner[number] == number:
            nodes = groups.nodes(members)
            steps.append(Partition(nodes, Kind.KERNEL, body_of(program.graph, nodes)))
    fused = Program(program.graph, ordered(steps, wiring), program.refusals)
    fused.verify()
    return fused


class _Groups:
    """Groups of steps, by number; a group has the number of its first step.

    proposes: measured times decide later, so two products with packed weights may be fused.
    """

    def __init__(self, steps: Sequence[Partition], wiring: Wiring, figures: GpuFigures, proposes: bool):
        self.steps, self.wiring, self.figures, self.proposes = steps, wiring, figures, proposes
        self.owner = list(range(len(steps)))
        self.members: list[tuple[int, ...]] = [(i,) for i in range(len(steps))]
        step_of = {node: i for i, step in enumerate(steps) for node in step.nodes}
        self.step_of = [step_of[node] for node in wiring.nodes]

    def nodes(self, members: Iterable[int]) -> tuple[Node, ...]:
        """Return the nodes of some steps, in graph order."""
        return tuple(sorted((n for i in members for n in self.steps[i].nodes), key=self.wiring.index.__getitem__))

    def extend(self, number: int) -> None:
        """Fuse a group with the groups that read its results, as long as one kernel runs them all."""
        if self.owner[number] != number or not self._may_fuse(number):
            return
        refused: set[int] = set()
        while True:
            found = [self._through_views(number, r) for r in self._readers(number) if r not in refused]
            readers = [each for each in found if self._may_fuse(each[-1])]
            reader = next((each for each in readers if self._is_kernel(number, each)), None)
            if reader is None:
                return
            refused.update(each[0] for each in readers[: readers.index(reader)])
            for each in reader:
                self.members[number] += self.members[each]
                for member in self.members[each]:
                    self.owner[member] = number
                self.members[each] = ()

    def _through_views(self, number: int, reader: int) -> tuple[int, ...]:
        """Return a reader of a group that only moves elements, or views of its result and the reader of these.

        The kernel of that reader may read what was to be moved where it is, as a concat reads a slice of channels.
        """
        groups = (reader,)
        if all(isinstance(node.op, VIEW_OPS) for node in self.nodes(self.members[number])):
            while len(after := self._readers(groups[-1])) == 1 and _is_view(self.steps[groups[-1]]):
                groups = (*groups, *after)
        return groups

    def extend_with_products(self, number: int) -> None:
        """Fuse a group with steps that read its results, products included, into the longest one that a kernel runs."""
        if self.owner[number] != number or not fusion_proposals.may_begin(self.steps[number].nodes, self.figures):
            return
        members, longest = (number,), ()
        while True:
            found = sorted({r for i in members for r in self._readers(i)} - set(members))
            reader = next((r for r in found if self._may_follow(members, r)), None)
            if reader is None:
                break
            members = (*members, reader)
            nodes = self.nodes(members)
            if fusion_proposals.is_joint_work(nodes) and find(nodes, outputs_of(nodes), self.figures) is not None:
                longest = members
        if longest:
            self.members[number] = longest
            for each in longest[1:]:
                self.owner[each], self.members[each] = number, ()

    def _may_follow(self, members: tuple[int, ...], reader: int) -> bool:
        """Tell if a step that reads results of some steps may join them, and no path leaves and returns."""
        alone = self.owner[reader] == reader and len(self.members[reader]) == 1
        return (
            alone
            and fusion_proposals.may_begin(self.nodes((*members, reader)), self.figures)
            and not self._has_path_around(members, reader)
        )

    def _has_path_around(self, members: tuple[int, ...], end: int) -> bool:
        """Tell if a path leads from some steps to another through a third."""
        stack = [r for i in members for r in self._readers(i) if r != end and r not in members]
        seen = set(stack)
        while stack:
            if len(seen) > SEARCH_LIMIT:
                return True
            for r in self._readers(stack.pop()):
                if r == end:
                    return True
                if r not in seen:
                    seen.add(r)
                    stack.append(r)
        return False

    def _may_fuse(self, number: int) -> bool:
        """Tell if a group may be fused: it runs as kernels or as pointwise steps of cuDNN, with views within it."""
        steps = [self.steps[i] for i in self.members[number]]
        return all(
            step.kind is Kind.KERNEL
            or (step.kind is Kind.CUDNN and all(can_generate(node) for node in step.nodes))
            or (_is_view(step) and len(steps) > 1)
            for step in steps
        )

    def _readers(self, number: int) -> list[int]:
        """List the groups that read a group's results, in order."""
        found = dict.fromkeys(
            self.owner[self.step_of[user]]
            for i in self.members[number]
            for node in self.steps[i].nodes
            for user in self.wiring.succs[self.wiring.index[node]]
        )
        return sorted(group for group in found if group != number)

    def _is_kernel(self, number: int, readers: Sequence[int]) -> bool:
        """Tell if one kernel runs a group, views of its results, and the group that reads these."""
        *views, reader = readers
        members = (*self.members[number], *views, *self.members[reader])
        steps = [self.steps[i] for i in members]
        if not any(step.kind is Kind.KERNEL for step in steps):
            return False  # the partitioner or measured times decide about steps of cuDNN alone
        nodes, pair = self.nodes(members), [self.nodes(self.members[i]) for i in (number, reader)]
        if len(nodes) > MAX_NODES or self._repeats(*pair) or any(map(is_mask, outputs_of(pair[0]))):
            return False
        if fusion_proposals.is_joint_work(nodes) and not any(fusion_proposals.is_joint_work(each) for each in pair):
            return False  # such a kernel was proposed before, and the separate steps were faster
        if not self.proposes and _packed_products(nodes) > 1 and max(map(_packed_products, pair)) == 1:
            return False  # the same
        kernel = self._kernel(nodes)
        if uses_no_tensor_cores(kernel) and not any(uses_no_tensor_cores(self._kernel(each)) for each in pair):
            return False  # another kernel runs the product faster
        return kernel is not None and not self._has_path_around((number, *views), reader)

    def _kernel(self, nodes: Sequence[Node]) -> Kernel | None:
        return find(nodes, outputs_of(nodes), self.figures)

    def _repeats(self, first: Sequence[Node], second: Sequence[Node]) -> bool:
        """Tell if the second would compute small results of the first many times."""
        first_size, second_size = (
            max(v.type.size for node in nodes for v in node.results) for nodes in (first, second)
        )
        is_small = first_size * 4 < second_size and second_size > MAX_REPEATED * self.figures.enough_threads
        return is_small and all(can_generate(node) for node in first)


def is_mask(value: Value) -> bool:
    """Tell if a value is a mask of 2 bits, which is stored for steps that run much later."""
    return value.type.dtype is DType.U2 and value.literal is None


def _is_view(step: Partition) -> bool:
    """Tell if a step changes the shape of its operand. A concat in place, which is no such step, has several."""
    return step.kind is Kind.VIEW and isinstance(step.nodes[0].op, VIEW_OPS)


def _packed_products(nodes: Sequence[Node]) -> int:
    return sum(isinstance(node.op, PackedMatMul) for node in nodes)
