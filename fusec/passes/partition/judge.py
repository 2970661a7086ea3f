"""Declare the interface of a judge, which tells partitioning if candidate partitions are legal.

The judges are in `gpu/cudnn/legality/judges.py`. They lower each candidate, and most of them ask cuDNN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from fusec.ir import Graph
from fusec.plans.verdict import Refused, Verdict


class Judge(Protocol):
    """Judges candidate partitions, each as a graph of its own (see `Partition.body`)."""

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        """Return one verdict per body, in order.

        A defect (no compiler library, no worker) is an exception, never a verdict.
        """
        ...


@runtime_checkable
class RefusesItself(Judge, Protocol):
    """Judge that knows some refusals without asking, so that no round of questions is spent on them."""

    def refusal(self, body: Graph) -> Refused | None:
        """Return the refusal that `judge` would return; None if it is not known without asking."""
        ...
