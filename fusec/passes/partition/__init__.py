"""Partition a graph into steps: what one cuDNN graph runs, what a kernel runs, and views."""

from __future__ import annotations

from fusec.passes.partition.equivalent_spellings import spellings
from fusec.passes.partition.judge import Judge
from fusec.passes.partition.partition_graph import kernels_only, ordered, partition
from fusec.passes.partition.verdict_cache import canonical_key

__all__ = ["Judge", "canonical_key", "kernels_only", "ordered", "partition", "spellings"]
