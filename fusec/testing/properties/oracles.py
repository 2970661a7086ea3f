"""Who says which partitions are legal while fuzzing: rules that need no cuDNN, and cuDNN itself.

What lowers is legal to the first four in different measure, so that between them every shape of partition is reached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache

from fusec.gpu.cudnn.legality import Oracle as CudnnOracle
from fusec.gpu.cudnn.partition_oracles import CudnnJudge, OfflineJudge
from fusec.ir import Constant, Graph
from fusec.ops import ANCHORS
from fusec.passes.partition.oracle import Oracle
from fusec.plans.verdict import Legal, Plan, Refused, Verdict
from fusec.schedule.aliasing import is_view
from fusec.targets.target import load
from fusec.testing.case import Case

PRECOMPILED = Legal((Plan(11, (), True, 0, True),))
GENERIC = Legal((Plan(0, (), True, 0, True),))  # legal, but not fast: other spellings are asked for too
RUNTIME = Legal((Plan(7, (), False, 0, True),))
DECLINED = Refused("plan", "FUSEC", "the judge declines it")

# In a hundred, by the first byte of a digest: refused, compiled at run time, the generic engine; else precompiled.
_MOODS = ((30, DECLINED), (55, RUNTIME), (65, GENERIC))


def lowers(case: Case) -> Oracle:
    """Whatever lowers is legal, with a precompiled plan: the largest partitions."""
    return OfflineJudge(case.options.tensor_cores, lambda body, key: PRECOMPILED)


def runtime(case: Case) -> Oracle:
    """Whatever lowers is legal, but compiled at run time: every spelling is asked for, and costs decide."""
    return OfflineJudge(case.options.tensor_cores, lambda body, key: RUNTIME)


def moody(case: Case) -> Oracle:
    """Refuses, or accepts in any way, by a hash of the body and the case's seed, among what lowers."""

    def legal(body: Graph, key: str) -> Verdict:
        mood = hashlib.sha256(f"{case.seed}\n{key}".encode()).digest()[0] * 100 // 256
        return next((verdict for limit, verdict in _MOODS if mood < limit), PRECOMPILED)

    return OfflineJudge(case.options.tensor_cores, legal)


def anchors(case: Case) -> Oracle:
    """Only anchors alone (a convolution, product, norm or reduction and views of it) are legal."""

    def legal(body: Graph, key: str) -> Verdict:
        computing = [n for n in body.nodes if not isinstance(n.op, Constant) and not is_view(n)]
        return PRECOMPILED if len(computing) == 1 and isinstance(computing[0].op, ANCHORS) else DECLINED

    return OfflineJudge(case.options.tensor_cores, legal)


@cache
def _oracle(target: str) -> CudnnOracle:
    """One per target and process: it owns worker processes and a memory."""
    return CudnnOracle(load(target), workers=2)  # fuzzing has a process on every core already


def cudnn(case: Case) -> Oracle:
    """cuDNN itself, by the description of the case's target; needs its wheels, no GPU."""
    return CudnnJudge(_oracle(case.target), case.options.tensor_cores)


JUDGES: Mapping[str, Callable[[Case], Oracle]] = {
    "lowers": lowers,
    "runtime": runtime,
    "moody": moody,
    "anchors": anchors,
    "cudnn": cudnn,
}
