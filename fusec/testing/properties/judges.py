"""Judge which partitions are legal while fuzzing: four rules that need no cuDNN, and cuDNN itself.

The rules accept different shares of the graphs that lower, so that together they reach every shape of partition.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache

from fusec.gpu.cudnn.legality.judges import CudnnJudge, OfflineJudge
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import Constant, Graph
from fusec.ops import ANCHORS
from fusec.passes.partition.judge import Judge
from fusec.plans.verdict import Legal, Plan, Refused, Verdict
from fusec.schedule.aliasing import is_view
from fusec.targets.target import load
from fusec.testing.case import Case

PRECOMPILED = Legal((Plan(11, (), True, 0, True),))
GENERIC = Legal((Plan(0, (), True, 0, True),))  # legal but slow, so other spellings are asked for, too
RUNTIME = Legal((Plan(7, (), False, 0, True),))
DECLINED = Refused("plan", "FUSEC", "the judge declines it")

# Upper limits in percent, for the first byte of a digest; above the last one, the plan is precompiled.
_MOODS = ((30, DECLINED), (55, RUNTIME), (65, GENERIC))


def lowers(case: Case) -> Judge:
    """Accept every graph that lowers, with a precompiled plan: the largest partitions."""
    return OfflineJudge(case.options.tensor_cores, lambda body, key: PRECOMPILED)


def runtime(case: Case) -> Judge:
    """Accept every graph that lowers, but with a plan compiled at run time.

    Every spelling is then asked for, and costs decide.
    """
    return OfflineJudge(case.options.tensor_cores, lambda body, key: RUNTIME)


def moody(case: Case) -> Judge:
    """Refuse or accept graphs that lower, with any kind of plan, by a hash of the body and the case's seed."""

    def legal(body: Graph, key: str) -> Verdict:
        mood = hashlib.sha256(f"{case.seed}\n{key}".encode()).digest()[0] * 100 // 256
        return next((verdict for limit, verdict in _MOODS if mood < limit), PRECOMPILED)

    return OfflineJudge(case.options.tensor_cores, legal)


def anchors(case: Case) -> Judge:
    """Accept only single anchors (a convolution, product, norm or reduction, and views of it)."""

    def legal(body: Graph, key: str) -> Verdict:
        computing = [n for n in body.nodes if not isinstance(n.op, Constant) and not is_view(n)]
        return PRECOMPILED if len(computing) == 1 and isinstance(computing[0].op, ANCHORS) else DECLINED

    return OfflineJudge(case.options.tensor_cores, legal)


@cache
def _oracle(target: str) -> Oracle:
    """Start the oracle of a target, one per process, because it owns worker processes and a cache."""
    return Oracle(load(target), workers=2)  # few, because fuzzing already runs a process on every core


def cudnn(case: Case) -> Judge:
    """Ask cuDNN itself, by the description of the case's target; needs its wheels, no GPU."""
    return CudnnJudge(_oracle(case.target), case.options.tensor_cores)


JUDGES: Mapping[str, Callable[[Case], Judge]] = {
    "lowers": lowers,
    "runtime": runtime,
    "moody": moody,
    "anchors": anchors,
    "cudnn": cudnn,
}
