"""Ask the cuDNN of this process about every pattern, for several targets, and find the nearest accepted spelling.

`main` runs as a child process, because a process can load one release of cuDNN only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from fusec.atlas.patterns import Pattern, patterns
from fusec.diagnostics.refusal_core.reduce import fewer_ops
from fusec.diagnostics.refusal_core.variants import Change, variants
from fusec.errors import FusecError
from fusec.gpu.cudnn.legality.judges import CudnnJudge
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.plans.engine_ids import Identity
from fusec.ir import Graph
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.partition import spellings
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.verdict import Legal, Refused, Verdict
from fusec.system.dataclass import dataclass
from fusec.targets.target import Target, load
from fusec.text import parse

CHANGES = 12  # changes that are tried for one refusal, at most
Proven = dict[str, list[Identity]]  # plans that were built, by compute capability and key of the graph


class _Oracle(Oracle):
    """Oracle that accepts a graph without a compilation if cuDNN offers a plan that was built before.

    It was built by another release, or for another GPU of the same compute capability. To list plans takes a twentieth
    of the time of a compilation.
    """

    def __init__(self, target: Target, proven: Proven):
        super().__init__(target, reuse_builds=True)
        self._proven_plans = proven

    def _put(self, graph: CudnnGraph, epoch: int, plan_filter: PlanFilter | None = None) -> Verdict:
        before = self._proven_plans.get(self._place(graph), ())
        self._built_plans.add(graph, before)
        return super()._put(graph, epoch, plan_filter)

    @property
    def _reads_listed(self) -> bool:
        """The atlas tells which plans were built, so another run's verdicts without a build do not count."""
        return False

    def collect(self, graph: CudnnGraph) -> None:
        """Add the plans that were built for a graph to those of the other releases."""
        built = {(plan.engine, plan.knobs) for plan in self.plans(graph) if plan.built}
        if built:
            place = self._place(graph)
            self._proven_plans[place] = sorted(built.union(self._proven_plans.get(place, ())))

    def _place(self, graph: CudnnGraph) -> str:
        return f"{self.target.sm}:{graph.key}"


class _Judge(CudnnJudge):
    """Judge that collects the plans that were built for the graphs it was asked about."""

    def __init__(self, oracle: _Oracle, tensor_cores: bool):
        super().__init__(oracle, tensor_cores)
        self._collector = oracle

    def best(self, bodies: Sequence[Graph]) -> list[tuple[Verdict, tuple[str, ...]]]:
        """Return the verdict on each body in its best spelling, and the names of that spelling.

        The best one has precompiled plans, or else is legal; of equal ones the body as it is.
        """
        spelled = [[(tuple(names), spelling) for names, spelling in spellings(body)] for body in bodies]
        answers = iter(self.judge([spelling for each in spelled for _, spelling in each]))
        judged = [[(next(answers), names) for names, _ in each] for each in spelled]
        return [min(each, key=lambda judged: _rank(*judged)) for each in judged]

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        verdicts = super().judge(bodies)
        for body, verdict in zip(bodies, verdicts, strict=True):
            if isinstance(verdict, Legal):
                self._collector.collect(lower(body, self.tensor_cores).graph)
        return verdicts


def _rank(verdict: Verdict, names: tuple[str, ...]) -> tuple[bool, bool, int]:
    legal = isinstance(verdict, Legal)
    return not legal, not (legal and verdict.precompiled), len(names)


@dataclass(frozen=True)
class _Judges:
    """The judges of one target, with tensor cores and without."""

    loose: _Judge
    strict: _Judge

    def best(self, asked: Sequence[tuple[Graph, bool]]) -> list[tuple[Verdict, tuple[str, ...]]]:
        """Return the verdict and the spelling of each body; `asked` tells if tensor cores are allowed."""
        answers = {
            cores: iter(judge.best([body for body, allowed in asked if allowed is cores]))
            for cores, judge in ((True, self.loose), (False, self.strict))
        }
        return [next(answers[cores]) for _, cores in asked]


def ask(target: Target, asked: Sequence[Pattern], proven: Proven) -> dict[str, Any]:
    """Ask about patterns on one target; return the versions, and an answer for each as `document.py` describes it.

    proven: plans that were built before; those built here are added.
    """
    bodies = [(parse(pattern.text), pattern.tensor_cores) for pattern in asked]
    with _Oracle(target, proven) as oracle:
        versions = oracle.prove()
        judges = _Judges(_Judge(oracle, True), _Judge(oracle, False))
        verdicts = judges.best(bodies)
        refused = [place for place, (verdict, _) in enumerate(verdicts) if isinstance(verdict, Refused)]
        nearest = dict(zip(refused, _nearest([bodies[place] for place in refused], judges), strict=True))
    answers = [_answer(verdict, names, nearest.get(place)) for place, (verdict, names) in enumerate(verdicts)]
    return {"target": target.name, **versions, "answers": answers}


def _nearest(bodies: Sequence[tuple[Graph, bool]], judges: _Judges) -> list[dict[str, Any] | None]:
    """Find the first change of each body that is accepted; each round asks about one change of every body left."""
    found: list[dict[str, Any] | None] = [None] * len(bodies)
    changes = [islice(_changes(body, strict=not cores), CHANGES) for body, cores in bodies]
    left = list(range(len(bodies)))
    while left:
        tried: dict[int, Change] = {place: change for place in left if (change := next(changes[place], None))}
        # only a change that rounds operands anyway may use tensor cores in true fp32
        asked = [(change.body, bodies[place][1] or change.rounds) for place, change in tried.items()]
        for (place, change), (verdict, names) in zip(tried.items(), judges.best(asked), strict=True):
            if isinstance(verdict, Legal):
                found[place] = {"change": change.words, **_engines(verdict, names)}
        left = [place for place in tried if found[place] is None]
    return found


def _changes(body: Graph, strict: bool) -> Iterator[Change]:
    """Return the changes that keep the ops, then the bodies without one op."""
    smaller = (Change(what, less) for what, _, less in fewer_ops(body) if less is not None)
    return chain(variants(body, strict), (change for change in smaller if change.words.startswith("without ")))


def _answer(verdict: Verdict, names: tuple[str, ...], nearest: dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(verdict, Legal):
        return {"accepted": True, **_engines(verdict, names), "built": any(plan.built for plan in verdict.plans)}
    stage, code, message = verdict.stage, verdict.code, verdict.message
    return {"accepted": False, "stage": stage, "code": code, "message": message, "nearest": nearest}


def _engines(verdict: Legal, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the engines of a verdict in cuDNN's order, each once."""
    engines = {
        kind: list(dict.fromkeys(plan.engine for plan in verdict.plans if plan.precompiled is precompiled))
        for kind, precompiled in (("precompiled", True), ("runtime", False))
    }
    return {**engines, "plans": len(verdict.plans), "spelling": list(names)}


def main() -> int:
    """Answer the question on stdin, one line of JSON for each target.

    In: `targets`, `only` (a glob of names of patterns) and `proven`. Out: for each target `target`, `cudnn`, `nvrtc`
    and `answers`; then `proven`. A line with `failed` is an error.
    """
    question = json.load(sys.stdin)
    proven = _plans(question["proven"])
    try:
        for name in question["targets"]:
            print(json.dumps(ask(load(name), patterns(question["only"]), proven)), flush=True)
    except FusecError as error:
        print(json.dumps({"failed": str(error)}), flush=True)
        return 2
    print(json.dumps({"proven": proven}), flush=True)
    return 0


def _plans(data: Mapping[str, Any]) -> Proven:
    """Read plans that were sent as JSON, which has lists where an identity has tuples."""
    return {key: [(e, tuple((k, v) for k, v in knobs)) for e, knobs in plans] for key, plans in data.items()}
