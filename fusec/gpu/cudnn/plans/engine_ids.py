"""Identify a plan of cuDNN by plain numbers: its engine and knobs."""

from __future__ import annotations

from typing import Any

from fusec.plans.plan_record import Knobs

Identity = tuple[int, Knobs]  # of a plan: engine and knobs


def identity_of(pygraph: Any, place: int) -> Identity:
    """Return the identity of the plan at a place in cuDNN's list for a frontend graph."""
    engine, knobs = pygraph.get_engine_and_knobs_at_index(place)
    return int(engine), tuple(sorted((int(k), int(v)) for k, v in knobs.items()))
