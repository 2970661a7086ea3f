"""Chooses the cover: which candidate, how much of it, in which spelling; first guessed, then asked.

A round plans the whole graph, taking for granted that what is not yet judged is accepted by the best
engines, and notes what it took for granted; the oracle judges that in one wave; rounds repeat until
nothing was guessed. So equal questions are put once, and independent ones together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fusec.ir import Graph, Node, quote
from fusec.passes.partition.candidates import ANCHORS, Candidate, Grower
from fusec.passes.partition.convexity import Condensation, Wiring
from fusec.passes.partition.cost_model import penalty, step_us
from fusec.passes.partition.oracle import Oracle
from fusec.passes.partition.verdict_cache import Answer, Answers
from fusec.plans.verdict import Legal
from fusec.schedule.aliasing import is_view
from fusec.schedule.program import Refusal, body_of
from fusec.targets.target import Target


@dataclass
class Plan:
    """Node numbers of each cuDNN step with its answer, and what was turned down on the way."""

    steps: list[tuple[tuple[int, ...], Answer]] = field(default_factory=list[tuple[tuple[int, ...], Answer]])
    declined: list[tuple[tuple[int, ...], Answer | str]] = field(
        default_factory=list[tuple[tuple[int, ...], Answer | str]]
    )


class Planner:
    """Plans rounds over one graph."""

    def __init__(
        self,
        graph: Graph,
        oracle: Oracle,
        target: Target,
        progress: Callable[[int, int], None] | None = None,
        aside: Sequence[Sequence[Node]] = (),
    ):
        """aside: steps of which cuDNN is not asked."""
        self.graph = graph
        self.target = target
        self.answers = Answers(graph, oracle, progress)
        self.wiring = Wiring(graph)
        self.condensation = Condensation(self.wiring)
        self.aside = [tuple(sorted(self.wiring.index[n] for n in nodes)) for nodes in aside]
        self.free = [True] * len(self.wiring.nodes)
        self.grower = Grower(self.wiring, self.condensation, self.free)
        self._anchors = self._from_behind()
        self._kind = self._kinds()
        self._keys: dict[tuple[int, ...], tuple[int, ...]] = {}

    def run(self) -> Plan:
        """Rounds until every step of the plan is accepted."""
        while True:
            plan = self._round()
            if not self.answers.ask():
                return plan

    def refusals(self, plan: Plan) -> list[Refusal]:
        """What the plan declined, in the order it was met."""
        result: list[Refusal] = []
        for numbers, why in plan.declined:
            nodes = self.nodes(numbers)
            reason = why if isinstance(why, str) else why.refused
            assert reason is not None
            result.append(Refusal(nodes, body_of(self.graph, nodes), reason))
        return result

    def nodes(self, numbers: Sequence[int]) -> tuple[Node, ...]:
        """The nodes of those numbers in graph order."""
        return tuple(self.wiring.nodes[i] for i in sorted(numbers))

    def _from_behind(self) -> list[int]:
        """Anchors, those with the most anchors before them first: of two convolutions that feed one add, that at the
        end of the longer chain takes it. The other's result is then its stored residual operand, which can be made
        beside that chain. What the one is refused, the other may still take."""
        depth: list[int] = []
        for i, node in enumerate(self.wiring.nodes):
            before = max((depth[p] for p in self.wiring.preds[i]), default=0)
            depth.append(before + isinstance(node.op, ANCHORS))
        anchors = (i for i, node in enumerate(self.wiring.nodes) if isinstance(node.op, ANCHORS))
        return sorted(anchors, key=lambda i: (depth[i], i), reverse=True)

    def _round(self) -> Plan:
        nodes = self.wiring.nodes
        self.condensation = Condensation(self.wiring)
        self.free = [True] * len(nodes)
        for numbers in self.aside:
            self.condensation.merge(numbers)
            for i in numbers:
                self.free[i] = False
        self.grower.reset(self.condensation, self.free)
        plan = Plan()
        for i in self._anchors:
            if self.free[i]:  # a product may be its sibling's already
                self._decide(plan, self.grower.around(i))
        for i in range(len(nodes)):
            if self.free[i] and self.grower.pointwise[i] and not is_view(nodes[i]):  # an identity is no work
                self._decide(plan, self.grower.cluster(i))
        return plan

    def _decide(self, plan: Plan, candidate: Candidate) -> None:
        length = self._pick(plan, candidate)
        taken = candidate.nodes[:length] or candidate.nodes[:1]
        for i in taken:
            self.free[i] = False
        if length:
            self.condensation.merge(taken)
            plan.steps.append((tuple(taken), self._answer(taken)))  # refused ones are held, in rounds not the last
        for i in candidate.blocked:
            reason = f"{quote(self.wiring.nodes[i].results[0].name)} depends on the partition through a step outside it"
            plan.declined.append(((*taken, i), reason))

    def _pick(self, plan: Plan, candidate: Candidate) -> int:
        """How many of the candidate's nodes to take; 0 if cuDNN declines the first alone."""
        nodes, full = candidate.nodes, len(candidate.nodes)
        whole = self._answer(nodes)
        if whole.refused is None and self._penalty(nodes, whole) == 1.0:
            self.answers.want(whole)
            return full  # the fewest launches and bytes, at the best engines' speed
        answers = {k: self._answer(nodes[:k]) for k in range(1, full + 1)}
        legal = [k for k, a in answers.items() if a.legal is not None]
        refused = [k for k, a in answers.items() if a.refused is not None]
        plan.declined.extend((tuple(nodes[:k]), answers[k]) for k in refused)
        # Between the longest accepted and the shortest refused: what is refused is not hoped to be accepted
        # with more added, so halving finds the longest acceptable one in few questions.
        high = min(refused, default=full + 1)
        low = max((k for k in legal if k < high), default=0) if refused else full
        if high - low > 1:
            middle = candidate.core if low < candidate.core < high else (low + high) // 2
            self.answers.want(answers[middle])
            return full  # held until decided: what may be left over is not asked about yet
        usable = sorted({*legal, *(k for k in range(1, low + 1) if k not in refused)})
        if not usable:
            return 0
        costs = {k: round(self._cover_us(nodes, k, answers[k]), 3) for k in usable}  # a nanosecond is a tie
        best = min(usable, key=lambda k: (costs[k], -k))
        self.answers.want(answers[best])
        for k in usable:
            if k > best and answers[k].legal is not None:
                reason = f"modelled {costs[k]:.1f} us as one step, {costs[best]:.1f} us split"
                plan.declined.append((tuple(nodes[:k]), reason))
        return best

    def _cover_us(self, nodes: Sequence[int], length: int, answer: Answer) -> float:
        """Modelled time of the first `length` nodes as one step, and the rest as pointwise steps."""
        total = step_us(self.nodes(nodes[:length]), self.target, self._verdict(answer))
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

    def _penalty(self, numbers: Sequence[int], answer: Answer) -> float:
        return penalty(self.nodes(numbers), self._verdict(answer))

    @staticmethod
    def _verdict(answer: Answer) -> Legal | None:
        """The verdict that will stand; None while a better spelling is not yet judged."""
        legal = answer.legal
        return None if legal is None or answer.unasked else legal[1]

    # equal work, equal key ---------------------------------------------------------------------------

    def _kinds(self) -> list[int]:
        """A small number for each node: equal for equal op, types and scalar operands."""
        seen: dict[object, int] = {}
        result: list[int] = []
        for node in self.wiring.nodes:
            operands = tuple((v.type, v.literal is None, repr(v.scalar())) for v in node.operands)
            kind = (node.op.name, repr(node.op.attributes), operands, tuple(v.type for v in node.results))
            result.append(seen.setdefault(kind, len(seen)))
        return result

    def _answer(self, numbers: Sequence[int]) -> Answer:
        """The answer for a set of nodes, found by what they compute."""
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
            key.append(self._kind[i])
            key.extend(number.setdefault(v, len(number)) for v in node.operands)
            for value in node.results:
                number[value] = len(number)
                key.append(any(user not in inside for user, _ in value.uses))
        return tuple(key)
