"""Test the rules of the tests' `Measured` oracle against the real cuDNN: they must not drift apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import quick
from passes.partition.judges import Measured
from passes.partition.test_cases import FILES, cases, read_graph

from fusec.gpu.cudnn.legality.judges import CudnnJudge
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import Graph
from fusec.passes.partition import canonical_key, partition
from fusec.passes.partition.cost_model import is_fast
from fusec.plans.verdict import Refused, Verdict
from fusec.targets.target import load

pytestmark = pytest.mark.cudnn


@pytest.fixture(scope="module")
def judge() -> Iterator[CudnnJudge]:
    oracle = Oracle(load("h200"))
    yield CudnnJudge(oracle, tensor_cores=True)
    oracle.close()


def kind(verdict: Verdict) -> str:
    if isinstance(verdict, Refused):
        return "refused"
    return "fast" if is_fast(verdict) else "slow"


@pytest.mark.parametrize("path", quick(FILES, [f for f in FILES if f.stem != "residual"]), ids=lambda p: p.stem)
def test_the_rules_agree_with_cudnn(path: Path, judge: CudnnJudge) -> None:
    measured = Measured()
    for title, text, _ in cases(path):
        if not title.endswith("]"):
            partition(read_graph(text), measured, load("h200"))
    bodies: dict[str, Graph] = {canonical_key(b): b for b in measured.asked}
    real = judge.judge(list(bodies.values()))
    differ = [
        f"{kind(verdict)}, not {kind(measured.verdict(body))}: {verdict}\n{body}"
        for body, verdict in zip(bodies.values(), real, strict=True)
        if kind(verdict) != kind(measured.verdict(body))
    ]
    assert not differ, "\n\n".join(differ)
