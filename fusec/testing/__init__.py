"""Property-based testing of fusion: strategies for graphs, the properties that must hold of them, and findings.

Needs Hypothesis: pip install 'fusec[fuzz]'. docs/fuzzing.md is the way in.
"""

from __future__ import annotations

from fusec.testing.case import Case, MismatchError, Property, Trust
from fusec.testing.properties import PROPERTIES, keeps_meaning
from fusec.testing.strategies import cases, dtypes, graphs, ops, orders, shapes, single_ops, tensor_types
from fusec.testing.uniform import register

__all__ = [
    "PROPERTIES",
    "Case",
    "MismatchError",
    "Property",
    "Trust",
    "cases",
    "dtypes",
    "graphs",
    "keeps_meaning",
    "ops",
    "orders",
    "register",
    "shapes",
    "single_ops",
    "tensor_types",
]
