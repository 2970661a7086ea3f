"""Cache the judge's verdicts, so that equal bodies are judged once, however often they occur."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

from fusec.ir import Constant, Graph, Node, Value, print_attribute
from fusec.passes.partition.cost_model import is_fast
from fusec.passes.partition.equivalent_spellings import spellings
from fusec.passes.partition.judge import Judge, RefusesItself
from fusec.plans.verdict import Legal, Refused, Verdict
from fusec.schedule.program import body_of
from fusec.system.dataclass import dataclass

BATCH = 128  # bodies per request: workers wait for the last of each, but only between two is progress shown

Spelled = tuple[tuple[str, ...], str]  # names of the spellings, canonical key of the body


def canonical_key(body: Graph) -> str:
    """Return a text that is equal for bodies that compute the same: ops, attributes, types and wiring.

    Names are left out, and so is the content of constants. Single numbers count, because they act as parameters of
    ops.
    """
    number: dict[Value, int] = {v: i for i, v in enumerate(body.inputs)}
    parts = [f"({', '.join(str(v.type) for v in body.inputs)})"]
    for node in body.nodes:
        if isinstance(node.op, Constant):
            continue
        operands = ", ".join(_operand(v, number) for v in node.operands)
        for value in node.results:
            number[value] = len(number)
        attributes = "".join(f" {k}={print_attribute(a)}" for k, a in node.op.attributes.items())
        parts.append(f"{node.op.name}({operands}){attributes} : {', '.join(str(v.type) for v in node.results)}")
    parts.append(f"return {', '.join(_operand(v, number) for v in body.outputs)}")
    return "\n".join(parts)


def _operand(value: Value, number: dict[Value, int]) -> str:
    if value in number:
        return f"%{number[value]}"
    number[value] = len(number)
    scalar = value.scalar()
    return f"%{number[value]} = constant {'' if scalar is None else repr(scalar)} : {value.type}"


@dataclass
class CandidateVerdicts:
    """Spellings of one candidate in order, and the verdicts known so far."""

    spelled: list[Spelled]
    known: dict[str, Verdict] = field(repr=False)  # shared by all: verdict by canonical key

    @property
    def legal(self) -> tuple[tuple[str, ...], Legal] | None:
        """Return the spelling to use: the first with fast precompiled engines, else the first accepted."""
        accepted = [(names, v) for names, key in self.spelled if isinstance(v := self.known.get(key), Legal)]
        return next((a for a in accepted if is_fast(a[1])), accepted[0] if accepted else None)

    @property
    def refused(self) -> Refused | None:
        """Return the reason once every spelling is refused: that of the body as it is, which comes last."""
        verdicts = [self.known.get(key) for _, key in self.spelled]
        last = verdicts[-1]
        return last if isinstance(last, Refused) and all(isinstance(v, Refused) for v in verdicts) else None

    @property
    def unasked(self) -> list[str]:
        """List what to ask next: the best spelling first; the rest only if that has no fast engine."""
        first = self.spelled[0][1]
        if first not in self.known:
            return [first]
        legal = self.legal
        if legal is not None and is_fast(legal[1]):
            return []
        return [key for _, key in self.spelled if key not in self.known]


class VerdictCache:
    """Asks the judge in batches, and caches its verdicts."""

    def __init__(self, graph: Graph, judge: Judge, progress: Callable[[int, int], None] | None):
        self.graph = graph
        self.judge = judge
        self._refusal = judge.refusal if isinstance(judge, RefusesItself) else None
        self.progress = progress
        self.known: dict[str, Verdict] = {}
        self.bodies: dict[str, Graph] = {}  # one body for each canonical key not yet judged
        self.waiting: dict[str, None] = {}
        self._answers: dict[object, CandidateVerdicts] = {}

    def of(self, nodes: Sequence[Node], key: object) -> CandidateVerdicts:
        """Return the verdicts for nodes in graph order; `key` is equal for nodes whose bodies are equal."""
        answer = self._answers.get(key)
        if answer is None:
            spelled: list[Spelled] = []
            for names, body in spellings(body_of(self.graph, nodes)):
                text = canonical_key(body)
                spelled.append((names, text))
                if text not in self.known and text not in self.bodies:
                    refused = None if self._refusal is None else self._refusal(body)
                    if refused is None:
                        self.bodies[text] = body
                    else:
                        self.known[text] = refused
            answer = self._answers[key] = CandidateVerdicts(spelled, self.known)
        return answer

    def want(self, answer: CandidateVerdicts) -> None:
        """Put the missing verdicts into the next batch."""
        self.waiting.update(dict.fromkeys(answer.unasked))

    def ask(self) -> bool:
        """Judge what is waiting; return False if there was nothing."""
        wave = list(self.waiting)
        self.waiting.clear()
        for start in range(0, len(wave), BATCH):
            if self.progress is not None:
                self.progress(len(self.known), len(self.known) + len(wave) - start)
            keys = wave[start : start + BATCH]
            verdicts = self.judge.judge([self.bodies.pop(key) for key in keys])
            self.known.update(zip(keys, verdicts, strict=True))
        if wave and self.progress is not None:
            self.progress(len(self.known), len(self.known))
        return bool(wave)
