"""Choose what fuses: which candidates become steps, how many nodes each has, in which spelling, and why not more.

A round plans the whole graph and assumes that candidates without a verdict are accepted by the best engines. The
judge then judges the assumed ones in one batch. Rounds repeat until nothing was assumed, so each question is asked
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

from fusec.ir import Graph, Node, quote
from fusec.ops import ANCHORS
from fusec.passes.partition.candidates import Candidate, Grower
from fusec.passes.partition.convexity import Condensation, Wiring
from fusec.passes.partition.cost_model import PENALISED, penalty, step_us
from fusec.passes.partition.judge import Judge
from fusec.passes.partition.verdict_cache import CandidateVerdicts, VerdictCache
from fusec.plans.verdict import UNASKED, Legal, Refused
from fusec.schedule.aliasing import is_view
from fusec.schedule.program import Refusal, body_of
from fusec.system.dataclass import dataclass
from fusec.targets.target import Target


@dataclass
class Cover:
    """Node numbers of each cuDNN step with its verdicts, and the candidates that were declined."""

    steps: list[tuple[tuple[int, ...], CandidateVerdicts]] = field(
        default_factory=list[tuple[tuple[int, ...], CandidateVerdicts]]
    )
    declined: list[tuple[tuple[int, ...], CandidateVerdicts | str]] = field(
        default_factory=list[tuple[tuple[int, ...], CandidateVerdicts | str]]
    )


class CoverSearch:
    """Searches for a cover of one graph, in rounds."""

    def __init__(
        self,
        graph: Graph,
        judge: Judge,
        target: Target,
        progress: Callable[[int, int], None] | None = None,
        kernel_steps: Sequence[Sequence[Node]] = (),
    ):
        """Prepare a search; `kernel_steps` are steps of which cuDNN is not asked."""
        self.graph = graph
        self.target = target
        self.answers = VerdictCache(graph, judge, progress)
        self.wiring = Wiring(graph)
        self.condensation = Condensation(self.wiring)
        self.kernel_steps = [tuple(sorted(self.wiring.index[n] for n in nodes)) for nodes in kernel_steps]
        self.free = [True] * len(self.wiring.nodes)
        self.grower = Grower(self.wiring, self.condensation, self.free)
        self._anchors = self._deepest_anchors_first()
        self._class = self._node_classes()
        self._keys: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._costs: dict[tuple[tuple[int, ...], int, Legal | None], float] = {}

    def run(self) -> Cover:
        """Plan rounds until every step of the cover is accepted."""
        while True:
            plan = self._round()
            if not self.answers.ask():
                return plan

    def refusals(self, plan: Cover) -> list[Refusal]:
        """List the candidates that the cover declined, in the order they were seen."""
        result: list[Refusal] = []
        for numbers, why in plan.declined:
            nodes = self.nodes(numbers)
            reason = why if isinstance(why, str) else why.refused
            assert reason is not None
            result.append(Refusal(nodes, body_of(self.graph, nodes), reason))
        return result

    def nodes(self, numbers: Sequence[int]) -> tuple[Node, ...]:
        """Return the nodes of those numbers in graph order."""
        return tuple(self.wiring.nodes[i] for i in sorted(numbers))

    def _deepest_anchors_first(self) -> list[int]:
        """List anchors, those with the most anchors before them first.

        Of two convolutions that feed one add, the one with more anchors before it takes the add. The other's result
        becomes the stored residual operand, which can be computed in parallel. An op that one is refused, the other
        may still take.
        """
        depth: list[int] = []
        for i, node in enumerate(self.wiring.nodes):
            before = max((depth[p] for p in self.wiring.preds[i]), default=0)
            depth.append(before + isinstance(node.op, ANCHORS))
        anchors = (i for i, node in enumerate(self.wiring.nodes) if isinstance(node.op, ANCHORS))
        return sorted(anchors, key=lambda i: (depth[i], i), reverse=True)

    def _round(self) -> Cover:
        nodes = self.wiring.nodes
        self.condensation = Condensation(self.wiring)
        self.free = [True] * len(nodes)
        for numbers in self.kernel_steps:
            self.condensation.merge(numbers)
            for i in numbers:
                self.free[i] = False
        self.grower.reset(self.condensation, self.free)
        plan = Cover()
        for i in self._anchors:
            if self.free[i]:  # a product may already be in its sibling's step
                self._decide(plan, self.grower.around(i))
        for i in range(len(nodes)):
            if self.free[i] and self.grower.pointwise[i] and not is_view(nodes[i]):  # an identity computes nothing
                self._decide(plan, self.grower.cluster(i))
        return plan

    def _decide(self, plan: Cover, candidate: Candidate) -> None:
        length = self._pick(plan, candidate)
        # of an unasked candidate only the first node is asked about; growing others from the rest would take long
        unasked = self._answer(candidate.nodes).refused == UNASKED
        taken = candidate.nodes if unasked else candidate.nodes[:length] or candidate.nodes[:1]
        for i in taken:
            self.free[i] = False
        if length:
            step = candidate.nodes[:length]
            self.condensation.merge(step)
            plan.steps.append((tuple(step), self._answer(step)))  # the last round alone has only accepted ones
        for i in candidate.blocked:
            reason = f"{quote(self.wiring.nodes[i].results[0].name)} depends on the partition through a step outside it"
            plan.declined.append(((*taken, i), reason))

    def _pick(self, plan: Cover, candidate: Candidate) -> int:
        """Return the number of the candidate's nodes to take; 0 if cuDNN declines the first alone."""
        nodes, full = candidate.nodes, len(candidate.nodes)
        whole = self._answer(nodes)
        if whole.refused == UNASKED:
            plan.declined.append((tuple(nodes), whole))
            first = self._answer(nodes[:1])  # a product alone is asked about whatever the budget is
            self.answers.want(first)
            return int(first.refused is None)
        if whole.refused is None and self._penalty(nodes, whole) == 1.0:
            self.answers.want(whole)
            return full  # the fewest launches and bytes, at the best engines' speed
        low, refused = self._bisected(candidate) if whole.refused is not None else (full, {})
        plan.declined.extend((tuple(nodes[:k]), refused[k]) for k in sorted(refused))
        if low == 0:
            return 0
        if refused and (unknown := self._answer(nodes[:low])).legal is None:
            own = _is_own(refused[min(refused)].refused)
            if not own or self._has_penalty(nodes):
                self.answers.want(unknown)
                return low if own else full  # full until decided, so that nothing is asked about the rest yet
            # no verdict changes the costs below, so that the length can be chosen before cuDNN is asked
        usable = [k for k in range(1, low + 1) if self._answer(nodes[:k]).refused is None]
        # rounded, because a nanosecond is a tie
        costs = {k: round(self._cover_us(nodes, k, self._answer(nodes[:k])), 3) for k in usable}
        best = min(usable, key=lambda k: (costs[k], -k))
        self.answers.want(self._answer(nodes[:best]))
        for k in usable:
            if k > best and self._answer(nodes[:k]).legal is not None:
                reason = f"modelled {costs[k]:.1f} us as one step, {costs[best]:.1f} us split"
                plan.declined.append((tuple(nodes[:k]), reason))
        return best

    def _bisected(self, candidate: Candidate) -> tuple[int, dict[int, CandidateVerdicts]]:
        """Return the number of nodes to ask about or, if that is judged, to take; and the verdicts that refused more.

        A longer candidate is not expected to be accepted where a shorter one is refused, so bisection finds the longest
        acceptable one in few questions. Where fusec itself refused the longer ones, cuDNN is expected to accept the
        rest, and only the longest is asked about.
        """
        nodes = candidate.nodes
        low, high = 0, len(nodes)
        refused = {high: self._answer(nodes)}
        while high - low > 1:
            middle = candidate.core if low < candidate.core < high else (low + high) // 2
            answer = self._answer(nodes[:middle])
            if answer.refused is not None:
                high, refused[middle] = middle, answer
                continue
            low = middle
            if answer.legal is None and not _is_own(refused[high].refused):
                break
        return low, refused

    def _cover_us(self, nodes: Sequence[int], length: int, answer: CandidateVerdicts) -> float:
        """Model the time of the first `length` nodes as one step, and the rest as pointwise steps."""
        verdict = self._verdict(answer)
        known = (tuple(nodes), length, verdict)
        if known not in self._costs:
            self._costs[known] = self._modelled_us(nodes, length, verdict)
        return self._costs[known]

    def _modelled_us(self, nodes: Sequence[int], length: int, verdict: Legal | None) -> float:
        total = step_us(self.nodes(nodes[:length]), self.target, verdict)
        rest = dict.fromkeys(nodes[length:])
        while rest:
            stack = [next(iter(rest))]
            del rest[stack[0]]
            component: list[int] = []
            while stack:
                i = stack.pop()
                component.append(i)
                for j in (*self.wiring.preds[i], *self.wiring.succs[i]):
                    if j in rest:
                        del rest[j]
                        stack.append(j)
            total += step_us(self.nodes(component), self.target)
        return total

    def _has_penalty(self, numbers: Sequence[int]) -> bool:
        """Tell if the modelled time depends on cuDNN's verdict."""
        return any(isinstance(self.wiring.nodes[i].op, PENALISED) for i in numbers)

    def _penalty(self, numbers: Sequence[int], answer: CandidateVerdicts) -> float:
        return penalty(self.nodes(numbers), self._verdict(answer))

    @staticmethod
    def _verdict(answer: CandidateVerdicts) -> Legal | None:
        """Return the verdict that will stand; None while a better spelling is not yet judged."""
        legal = answer.legal
        return None if legal is None or answer.unasked else legal[1]

    # equal work, equal key ---------------------------------------------------------------------------

    def _node_classes(self) -> list[int]:
        """Give each node a small number, equal for equal op, types and scalar operands."""
        seen: dict[object, int] = {}
        result: list[int] = []
        for node in self.wiring.nodes:
            operands = tuple((v.type, v.literal is None, repr(v.scalar())) for v in node.operands)
            kind = (node.op.name, repr(node.op.attributes), operands, tuple(v.type for v in node.results))
            result.append(seen.setdefault(kind, len(seen)))
        return result

    def _answer(self, numbers: Sequence[int]) -> CandidateVerdicts:
        """Find the verdicts for a set of nodes by what they compute, so that equal bodies share them."""
        order = tuple(sorted(numbers))
        key = self._keys.get(order)
        if key is None:
            key = self._keys[order] = self._key(order)
        return self.answers.of([self.wiring.nodes[i] for i in order], key)

    def _key(self, order: tuple[int, ...]) -> tuple[int, ...]:
        inside = {self.wiring.nodes[i] for i in order}
        number: dict[object, int] = {}
        key: list[int] = []
        for i in order:
            node = self.wiring.nodes[i]
            key.append(self._class[i])
            key.extend(number.setdefault(v, len(number)) for v in node.operands)
            for value in node.results:
                number[value] = len(number)
                key.append(any(user not in inside for user, _ in value.uses))
        return tuple(key)


def _is_own(refusal: Refused | None) -> bool:
    """Tell if fusec refused a body without asking cuDNN, so that the refusal shows nothing of cuDNN's limits."""
    return refusal is not None and refusal.code.startswith("FUSEC")
