"""Print the section on what tuning is worth."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.results_of_costs import machine_of, read, section, spread

TITLE = "What tuning is worth"


def tuning() -> list[str]:
    """Return a table of models by tuning level, in the order of what `quick` gains; nothing where none was measured."""
    data = read("peers.json")
    rows = sorted((row for row in data["rows"] if row.get("levels")), key=lambda row: -_gain(row))
    if not rows:
        return []
    levels = [level for level in ("none", "full") if any(level in row["levels"] for row in rows)]
    cells = [
        [
            row["model"],
            row["batch"],
            *(_of_level(row["levels"].get(level)) for level in levels),
            f"{spread(row['times']['fusec'])}, {row['cold_s']}",
            f"{_gain(row):.2f}",
            row["commit"][:10],
        ]
        for row in rows
    ]
    return section(
        TITLE,
        f"{machine_of(data)}; fp16 (`benchmarks/models/peers.py --levels`). `none` runs the first plan of cuDNN's "
        "heuristics for each graph. `quick`, the default, times plans, kernels and fusions. Each cell shows ms, with "
        "deciles, and the seconds to the first result with empty caches. All take turns.",
        ["model", "batch", *(f"`{level}` ms, s" for level in levels), "`quick` ms, s", "none / quick", "commit"],
        cells,
    )


def _gain(row: dict[str, Any]) -> float:
    return row["levels"]["none"]["median_ms"] / row["times"]["fusec"]["median_ms"]


def _of_level(figures: dict[str, float] | None) -> str:
    return "not run" if figures is None else f"{spread(figures)}, {figures['cold_s']}"
