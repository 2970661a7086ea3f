"""Reduce a refused body to the smallest core that is still refused, and find the nearest accepted variant of it.

This is delta debugging: ops, outputs, dims and dtypes are removed as long as the same refusal stays. The judge is
asked in batches, a bounded number of times, and never twice about the same body.

`fusec.testing.runner.shrink` shares the steps that make smaller graphs, but not the loop. Here one question takes up to
seconds and worker processes answer eight together. So questions are counted, and a removal that changed the refusal is
not asked again for another body of the same ops. Bodies that cuDNN accepts are results, too. There an attempt takes
milliseconds and may end its process, so attempts run one by one until the time is over. Every smaller graph is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from fusec.diagnostics.refusal_core.reduce import smaller_bodies
from fusec.diagnostics.refusal_core.variants import Change, variants
from fusec.ir import Constant, Graph
from fusec.ops import ANCHORS
from fusec.passes.partition import Judge, canonical_key, spellings
from fusec.plans.verdict import Legal, Refused, Verdict
from fusec.system.dataclass import dataclass

QUESTIONS = 60  # bodies that the judge is asked about for one refusal, at most
BATCH = 8  # bodies in one call: enough for all workers, and few that come after the first useful one
SPARE = 16  # questions reserved for the variants


@dataclass(frozen=True)
class Variant:
    """A change to the core that makes it accepted.

    whole: True if the same change makes the whole refused body accepted; None if that was not asked.
    """

    change: str
    body: Graph
    verdict: Legal
    whole: bool | None = None


@dataclass(frozen=True)
class Core:
    """A smallest refused body, its refusal, and the nearest accepted variant that was found.

    Unless the questions ran out, nothing more can be removed without changing the refusal.
    """

    body: Graph
    verdict: Refused
    variant: Variant | None
    questions: int


class CoreSearch:
    """Search for the cores of refused bodies. Equal bodies are searched once.

    loose: the judge with tensor cores allowed, for variants that round operands.
    """

    def __init__(self, judge: Judge, loose: Judge | None = None, questions: int = QUESTIONS):
        self.judge = judge
        self.loose = loose
        self.questions = questions
        self._known: dict[str, Verdict] = {}
        self._cores: dict[str, Core] = {}

    def find(self, body: Graph, refusal: Refused, asked: Callable[[int], None] | None = None) -> Core:
        """Return the core of a refused body. `asked` receives the number of questions so far."""
        key = canonical_key(body)
        if key not in self._cores:
            self._cores[key] = _Search(self, refusal, asked or (lambda count: None)).run(body)
        return self._cores[key]

    def ask(self, bodies: Sequence[Graph], judge: Judge | None = None) -> list[Verdict]:
        """Return one verdict for each body: legal if any of its spellings is, as for the partitioner."""
        prefix = "" if judge is None else "loose "
        spelled = [[(prefix + canonical_key(spelling), spelling) for _, spelling in spellings(body)] for body in bodies]
        new = {key: spelling for each in spelled for key, spelling in each if key not in self._known}
        if new:
            self._known.update(zip(new, (judge or self.judge).judge(list(new.values())), strict=True))
        return [_best([self._known[key] for key, _ in each]) for each in spelled]


class _Search:
    """One search, with its count of questions."""

    def __init__(self, owner: CoreSearch, refusal: Refused, asked: Callable[[int], None]):
        self.owner = owner
        self.refusal = refusal
        self.asked = asked
        self.left = owner.questions
        self.spare = min(SPARE, owner.questions // 3)
        self.tried: set[tuple[object, ...]] = set()
        self.accepted: dict[tuple[str, ...], Variant] = {}  # by the ops of the body that the change is of

    def run(self, body: Graph) -> Core:
        core, verdict = body, self.refusal
        while (smaller := self._shrink(core)) is not None:
            core, verdict = smaller
        variant = self._variant(core, body) or self._variant(body, None) or self.accepted.get(_ops(core))
        return Core(core, verdict, variant, self.owner.questions - self.left)

    def _shrink(self, core: Graph) -> tuple[Graph, Refused] | None:
        """Return the first smaller body that is refused in the same way."""
        ops = _ops(core)
        new = (s for s in smaller_bodies(core) if (ops, s.what, s.where) not in self.tried)
        while batch := list(islice(new, max(0, min(BATCH, self.left - self.spare)))):
            for smaller, verdict in zip(batch, self._ask([s.body for s in batch]), strict=True):
                if isinstance(verdict, Refused) and _same(verdict, self.refusal):
                    return smaller.body, verdict
                self.tried.add((ops, smaller.what, smaller.where))
                best = self.accepted.get(ops)
                if isinstance(verdict, Legal) and (best is None or _worth(smaller.body) > _worth(best.body)):
                    self.accepted[ops] = Variant(smaller.what, smaller.body, verdict)
        return None

    def _variant(self, body: Graph, whole: Graph | None) -> Variant | None:
        """Return the nearest accepted variant of a body, and tell if its change helps the whole body."""
        changes = variants(body, strict=self.owner.loose is not None)
        while batch := list(islice(changes, max(0, min(BATCH, self.left)))):
            for change, verdict in zip(batch, self._ask_each(batch), strict=True):
                if isinstance(verdict, Legal):
                    serves = True if whole is None else self._whole(whole, change.words)
                    return Variant(change.words, change.body, verdict, serves)
        return None

    def _whole(self, body: Graph, words: str) -> bool | None:
        """Tell if the same change makes the whole refused body accepted."""
        same = [c for c in variants(body, strict=self.owner.loose is not None) if c.words == words]
        return isinstance(self._ask_each(same[:1])[0], Legal) if same and self.left > 0 else None

    def _ask_each(self, changes: Sequence[Change]) -> list[Verdict]:
        """Return one verdict for each change. The loose judge answers for changes that round operands."""
        loose = [c.rounds and self.owner.loose is not None for c in changes]
        strict_answers = iter(self._ask([c.body for c, free in zip(changes, loose, strict=True) if not free]))
        loose_answers = iter(
            self._ask([c.body for c, free in zip(changes, loose, strict=True) if free], self.owner.loose)
        )
        return [next(loose_answers if free else strict_answers) for free in loose]

    def _ask(self, bodies: Sequence[Graph], judge: Judge | None = None) -> list[Verdict]:
        verdicts = self.owner.ask(bodies, judge) if bodies else []
        self.left -= len(bodies)
        self.asked(self.owner.questions - self.left)
        return verdicts


def _best(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a legal spelling, or else of the last spelling, which is the body itself."""
    return next((v for v in verdicts if isinstance(v, Legal)), verdicts[-1])


def _same(a: Refused, b: Refused) -> bool:
    """Tell if two refusals are of the same kind.

    cuDNN's messages are not compared, because they name engines and sizes. All NOT_SUPPORTED codes count as one,
    because the code depends on the engine that saw the graph first.
    """
    if a.stage == "lower" and b.stage == "lower":
        return _without_names(a.message) == _without_names(b.message)
    return a.stage == b.stage and _status(a.code) == _status(b.code)


def _status(code: str) -> str:
    return "NOT_SUPPORTED" if "NOT_SUPPORTED" in code else code


def _without_names(message: str) -> str:
    """Remove names, shapes and numbers from a message of lowering."""
    words = message.split()
    return " ".join(w for w in words if not w.startswith("%") and not any(c.isdigit() for c in w))


def _worth(body: Graph) -> tuple[bool, int]:
    """Measure what is left of a body: first if it has an anchor, then its number of ops."""
    ops = [node.op for node in body.nodes if not isinstance(node.op, Constant)]
    return any(isinstance(op, ANCHORS) for op in ops), len(ops)


def _ops(body: Graph) -> tuple[str, ...]:
    return tuple(node.op.name for node in body.nodes if not isinstance(node.op, Constant))
