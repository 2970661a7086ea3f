"""Who says whether a candidate partition is legal: cuDNN in earnest, a recording or a rule in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fusec.ir import Graph
from fusec.plans.verdict import Verdict


class Oracle(Protocol):
    """Judges bodies of candidate partitions (see program.Partition.body)."""

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        """One verdict per body, in order. A defect (no compiler library, no worker) is an exception."""
        ...
