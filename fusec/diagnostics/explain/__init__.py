"""Explain a compiled model: its steps, what did not fuse and why, and what stayed in floats."""

from __future__ import annotations

from fusec.diagnostics.explain.compare import compare
from fusec.diagnostics.explain.data import Accepted, Cause, Decline, Edge, Explanation, FloatEdge, Step
from fusec.diagnostics.explain.engine_classes import with_chosen_plans
from fusec.diagnostics.explain.explain_program import STAGES, Progress, explain, with_rows_in_place
from fusec.diagnostics.explain.float_edges import float_edges

__all__ = [
    "STAGES",
    "Accepted",
    "Cause",
    "Decline",
    "Edge",
    "Explanation",
    "FloatEdge",
    "Progress",
    "Step",
    "compare",
    "explain",
    "float_edges",
    "with_chosen_plans",
    "with_rows_in_place",
]
