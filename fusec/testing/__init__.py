"""Test fusion with random graphs: strategies for graphs, properties that must hold, and findings.

Needs Hypothesis: `pip install 'fusec[fuzz]'`. Saved findings are replayed without it. Public names are imported at
their first use, so that a module that needs Hypothesis can report that it is missing. docs/fuzzing.md is the guide.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusec.testing.case import Case, MismatchError, Property, Trust
    from fusec.testing.generators.uniform_provider import register
    from fusec.testing.properties.table import PROPERTIES, keeps_meaning
    from fusec.testing.strategies import (
        cases,
        dtypes,
        graphs,
        kernel_graphs,
        ops,
        orders,
        shapes,
        single_ops,
        tensor_types,
    )

_HOMES = {
    **dict.fromkeys(("Case", "MismatchError", "Property", "Trust"), "case"),
    **dict.fromkeys(("PROPERTIES", "keeps_meaning"), "properties.table"),
    **dict.fromkeys(
        ("cases", "dtypes", "graphs", "kernel_graphs", "ops", "orders", "shapes", "single_ops", "tensor_types"),
        "strategies",
    ),
    "register": "generators.uniform_provider",
}

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
    "kernel_graphs",
    "ops",
    "orders",
    "register",
    "shapes",
    "single_ops",
    "tensor_types",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fusec.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fusec.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
