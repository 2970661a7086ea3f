"""Properties of what a graph is compiled to: partitions, lowered graphs, and the executable that runs them."""

from __future__ import annotations

from fusec.testing.case import Property

PROPERTIES_COMPILE: tuple[Property, ...] = ()
