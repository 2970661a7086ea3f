"""Define the judges of candidate partitions: cuDNN through the oracle, fusec's own rules, or none for NumPy alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from fusec.errors import LoweringError
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.legality.verdict_keys import lasts
from fusec.ir import Constant, Graph
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.known_bugs import deadly, misread
from fusec.ops.op_sets import ATTENTION_OPS, PRODUCTS
from fusec.passes.partition import Judge, canonical_key
from fusec.passes.partition.strict_rounding import StrictRounding
from fusec.plans.verdict import PROPOSED, UNASKED, Refused, Verdict

HAZARD = "FUSEC_HAZARD"  # code of a graph that cuDNN is not asked about, because it would crash or be wrong


class CudnnJudge:
    """Judge that asks cuDNN. It refuses a body that cannot be lowered at stage `lower`.

    left_s: seconds for which it may still ask; the time of the partitioner does not count

    passing: refusals that may not hold the next time, such as of a graph that no memory was left for

    A product or attention alone is asked about even when no time is left: a kernel would run it without tensor cores.
    """

    def __init__(self, oracle: Oracle, tensor_cores: bool, left_s: float = math.inf):
        self.oracle = oracle
        self.tensor_cores = tensor_cores
        self.left_s = left_s
        self.passing: list[Refused] = []

    def within(self, budget_s: float) -> CudnnJudge:
        """Return a judge that asks cuDNN for `budget_s` seconds at most. A budget of 0 bounds only what is timed."""
        if budget_s == 0.0:
            return self
        judge = CudnnJudge(self.oracle, self.tensor_cores, budget_s)
        judge.passing = self.passing
        return judge

    def refusal(self, body: Graph) -> Refused | None:
        """Refuse a body that cannot be lowered, or is known to be wrong, or that no time is left to ask about."""
        if self.left_s <= 0.0 and not _one_product(body):
            return UNASKED
        return refusal(body, self.tensor_cores)

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        graphs: dict[int, CudnnGraph] = {}
        for index, body in enumerate(bodies):
            try:
                graphs[index] = lower(body, self.tensor_cores).graph
            except LoweringError as error:
                verdicts[index] = Refused("lower", "FUSEC", str(error))
        # without a budget all are asked about together, so that no worker waits for the others in between
        always = {i: graph for i, graph in graphs.items() if self.left_s == math.inf or _one_product(bodies[i])}
        others = {i: graph for i, graph in graphs.items() if i not in always}
        start = time.monotonic()
        for some, end in ((always, math.inf), (others, start + self.left_s)):
            verdicts.update(zip(some, self.oracle.judge(list(some.values()), end=end), strict=True))
        self.left_s -= time.monotonic() - start
        refused = (verdict for verdict in verdicts.values() if isinstance(verdict, Refused))
        self.passing += [verdict for verdict in refused if not lasts(verdict) and verdict.code != HAZARD]
        return [verdicts[index] for index in range(len(bodies))]


class OfflineJudge:
    """Judge without cuDNN: it refuses what cannot be lowered and known hazards, and `legal` judges the rest.

    legal: takes the body and its canonical key

    Each body is lowered and judged once.
    """

    def __init__(self, tensor_cores: bool, legal: Callable[[Graph, str], Verdict]):
        self._tensor_cores = tensor_cores
        self._legal = legal
        self._known: dict[str, Verdict] = {}

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        return [self._verdict(body) for body in bodies]

    def _verdict(self, body: Graph) -> Verdict:
        key = canonical_key(body)
        if key not in self._known:
            self._known[key] = refusal(body, self._tensor_cores) or self._legal(body, key)
        return self._known[key]


class RulesJudge(OfflineJudge):
    """Judge by fusec's own rules, where cuDNN is not installed. It proposes what the rules do not refuse.

    Its verdicts name no plan, and are never stored on disk.
    """

    def __init__(self, tensor_cores: bool):
        super().__init__(tensor_cores, lambda body, key: PROPOSED)


class NoJudge:
    """Judge that refuses every body, for a program of NumPy alone."""

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        return [Refused("fusec", "CPU", "compiled for NumPy alone") for _ in bodies]


def _one_product(body: Graph) -> bool:
    """Return True for one product or attention without other ops."""
    ops = [node.op for node in body.nodes if not isinstance(node.op, Constant)]
    return len(ops) == 1 and isinstance(ops[0], (*PRODUCTS, *ATTENTION_OPS))


def refusal(body: Graph, tensor_cores: bool) -> Refused | None:
    """Refuse a body that cannot be lowered, or for which cuDNN is known to crash or to be wrong; None for others."""
    try:
        graph = lower(body, tensor_cores).graph
    except LoweringError as error:
        return Refused("lower", "FUSEC", str(error))
    hazard = deadly(graph) or misread(graph)
    return Refused("validate", HAZARD, hazard) if hazard else None


def answers_last(judge: Judge | None) -> bool:
    """Tell if all answers of a judge hold the next time, so that a program may be stored that was built by them."""
    inner = judge.inner if isinstance(judge, StrictRounding) else judge
    return not isinstance(inner, CudnnJudge) or not inner.passing


def asks_cudnn(judge: Judge | None) -> bool:
    """Tell if a program's verdicts are cuDNN's. None is the judge of a program that was compiled elsewhere."""
    inner = judge.inner if isinstance(judge, StrictRounding) else judge
    return not isinstance(inner, (RulesJudge, NoJudge))
