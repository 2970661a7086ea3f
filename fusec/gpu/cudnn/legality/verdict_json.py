"""Encode verdicts as JSON data, for the pipes of workers and for files."""

from __future__ import annotations

from typing import Any

from fusec.plans.verdict import Legal, Plan, Refused, Verdict


def encode(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON data."""
    if isinstance(verdict, Refused):
        return {"refused": [verdict.stage, verdict.code, verdict.message]}
    return {
        "legal": [
            [p.engine, [list(k) for k in p.knobs], p.precompiled, p.workspace_bytes, p.built] for p in verdict.plans
        ]
    }


def decode(data: dict[str, Any]) -> Verdict:
    """Read a verdict from JSON data. Raises ValueError for other data, as in a damaged file."""
    if "refused" in data:
        stage, code, message = data["refused"]
        if not all(isinstance(text, str) for text in (stage, code, message)):
            raise ValueError(f"no refusal: {data['refused']!r}")
        return Refused(stage, code, message)
    return Legal(tuple(_plan(*plan) for plan in data["legal"]))


def _plan(engine: Any, knobs: Any, precompiled: Any, workspace_bytes: Any = 0, built: Any = False) -> Plan:
    """Read a plan of a verdict. Raises ValueError for values of other types."""
    pairs = tuple((k, v) for k, v in knobs)
    numbers = [engine, workspace_bytes, *(number for pair in pairs for number in pair)]
    if {type(number) for number in numbers} != {int} or {type(precompiled), type(built)} != {bool}:
        raise ValueError(f"no plan: engine {engine!r} with the knobs {knobs!r}")
    return Plan(engine, pairs, precompiled, workspace_bytes, built)
