"""Name cuDNN's engines and their knobs as plain numbers."""

from __future__ import annotations

from typing import Any

from fusec.plans.plan_record import Knobs

Identity = tuple[int, Knobs]  # of a plan: engine and knobs

PYTHON_ENGINES = 10_000  # engines from this number on belong to the frontend, not to the library
# Engines that cuDNN 9.19 offers on an H200 and does not build without a device, not even when named.
DEVICE_ONLY = frozenset({4, 53})


def identity_of(pygraph: Any, place: int) -> Identity:
    """Return the identity of the plan at a place in cuDNN's list for a frontend graph."""
    engine, knobs = pygraph.get_engine_and_knobs_at_index(place)
    return int(engine), tuple(sorted((int(k), int(v)) for k, v in knobs.items()))
