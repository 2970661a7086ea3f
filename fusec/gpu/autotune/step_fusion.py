"""Steps joined into one kernel: what a kernel can do behind or before another costs no launch and no trip to memory.

Steps that cuDNN does not run are joined with each other and with cuDNN's pointwise ones beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusec.gpu.autotune import fusion_proposals
from fusec.gpu.kernels import find
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.ir import Node
from fusec.passes.partition import ordered
from fusec.passes.partition.convexity import SEARCH_LIMIT, Wiring
from fusec.schedule.program import Kind, Partition, Program, body_of, outputs_of

MAX_NODES = 48  # of one kernel: compile time grows faster than that
# A small tensor's pointwise ops are done again for each element that it is broadcast to: cheaper than a launch, but
# not for large tensors.
AGAIN_ELEMENTS = 1 << 20


def grouped(program: Program, products: bool = False) -> Program:
    """The program with such steps joined wherever a kernel runs the whole. products: steps with products, too, that a
    kernel could run together; what cuDNN would do instead is measured (`step_candidates`)."""
    wiring = Wiring(program.graph)
    if not products and not any(step.kind is Kind.KERNEL for step in program.steps):
        return program
    groups = _Groups(program.steps, wiring)
    for number in range(len(program.steps)) if products else ():
        groups.unite(number)
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
    joined = Program(program.graph, ordered(steps, wiring), program.refusals)
    joined.verify()
    return joined


class _Groups:
    """Steps by number, each in the group of its owner."""

    def __init__(self, steps: Sequence[Partition], wiring: Wiring):
        self.steps, self.wiring = steps, wiring
        self.owner = list(range(len(steps)))
        self.members: list[tuple[int, ...]] = [(i,) for i in range(len(steps))]
        step_of = {node: i for i, step in enumerate(steps) for node in step.nodes}
        self.step_of = [step_of[node] for node in wiring.nodes]

    def nodes(self, members: Iterable[int]) -> tuple[Node, ...]:
        """The nodes of some steps, in graph order."""
        return tuple(sorted((n for i in members for n in self.steps[i].nodes), key=self.wiring.index.__getitem__))

    def extend(self, number: int) -> None:
        """Join a group with those that read what it makes, as long as a kernel runs the whole."""
        if self.owner[number] != number or not self._joins(number):
            return
        refused: set[int] = set()
        while True:
            readers = [r for r in self._readers(number) if r not in refused and self._joins(r)]
            reader = next((r for r in readers if self._is_kernel(number, r)), None)
            if reader is None:
                return
            refused.update(r for r in readers[: readers.index(reader)])
            self.members[number] += self.members[reader]
            for each in self.members[reader]:
                self.owner[each] = number
            self.members[reader] = ()

    def unite(self, number: int) -> None:
        """Join a group with those that read what it makes into the longest chain of work with products that one kernel
        runs."""
        if self.owner[number] != number or not fusion_proposals.begins(self.steps[number].nodes):
            return
        members, longest = (number,), ()
        while True:
            found = sorted({r for i in members for r in self._readers(i)} - set(members))
            reader = next((r for r in found if self._follows(members, r)), None)
            if reader is None:
                break
            members = (*members, reader)
            nodes = self.nodes(members)
            if fusion_proposals.is_union(nodes) and find(nodes, outputs_of(nodes)) is not None:
                longest = members
        if longest:
            self.members[number] = longest
            for each in longest[1:]:
                self.owner[each], self.members[each] = number, ()

    def _follows(self, members: tuple[int, ...], reader: int) -> bool:
        """Whether a step that reads what some make belongs to the same chain, and no other step stands between."""
        alone = self.owner[reader] == reader and len(self.members[reader]) == 1
        return alone and fusion_proposals.begins(self.nodes((*members, reader))) and not self._leads(members, reader)

    def _leads(self, members: tuple[int, ...], end: int) -> bool:
        """Whether a path leads from some steps to another through a third."""
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

    def _joins(self, number: int) -> bool:
        """Whether a group is a kernel's, or cuDNN's pointwise work."""
        steps = [self.steps[i] for i in self.members[number]]
        return all(
            step.kind is Kind.KERNEL or (step.kind is Kind.CUDNN and all(can_generate(node) for node in step.nodes))
            for step in steps
        )

    def _readers(self, number: int) -> list[int]:
        """The groups that read what one makes, in order."""
        found = dict.fromkeys(
            self.owner[self.step_of[user]]
            for i in self.members[number]
            for node in self.steps[i].nodes
            for user in self.wiring.succs[self.wiring.index[node]]
        )
        return sorted(group for group in found if group != number)

    def _is_kernel(self, number: int, reader: int) -> bool:
        members = (*self.members[number], *self.members[reader])
        steps = [self.steps[i] for i in members]
        if not any(step.kind is Kind.KERNEL for step in steps):
            return False  # cuDNN's own: the partitioner left them apart, or measured times will tell
        nodes, parts = self.nodes(members), [self.nodes(self.members[i]) for i in (number, reader)]
        if len(nodes) > MAX_NODES or self._repeats(*parts):
            return False
        if fusion_proposals.is_union(nodes) and not any(fusion_proposals.is_union(part) for part in parts):
            return False  # that was proposed, and what is apart now was faster
        return find(nodes, outputs_of(nodes)) is not None and not self._detour(number, reader)

    @staticmethod
    def _repeats(first: Sequence[Node], second: Sequence[Node]) -> bool:
        """Whether small results of the first would be computed over and over by the second."""
        made = max(v.type.size for node in first for v in node.results)
        space = max(v.type.size for node in second for v in node.results)
        return space > AGAIN_ELEMENTS and made * 4 < space and all(can_generate(node) for node in first)

    def _detour(self, start: int, end: int) -> bool:
        """Whether a path leads from one group to another through a third."""
        return self._leads((start,), end)
