"""Show the sample of exported models: what was compiled, how exact it is, and what is left to references."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.results_of_costs import read, section


def model_sample() -> list[str]:
    """Return the section of docs/results.md about benchmarks/results/model_sample.json."""
    data = read("model_sample.json")
    rows: list[dict[str, Any]] = sorted(data["rows"], key=lambda row: (row["from"], row["model"]))
    right = sum(row["ok"] for row in rows)
    where = f"on an {data['gpu']}" if "gpu" in data else f"in simulation of {data['target']}, without a GPU"
    names = ("torch", "torchvision", "timm", "transformers")
    libraries = ", ".join(f"{name} {data[name]}" for name in names if name in data)
    commits = sorted({row["commit"][:7] for row in rows})
    header = ["from", "model", "launches", "steps", "programs", "error", "left to references", "warnings"]
    return section(
        "A sample of exported models",
        "Small configurations with random weights, exported by torch's ONNX exporter. They are compiled in fp32 "
        f"without timing and run {where}; {libraries}; commit {', '.join(commits)}, {max(row['date'] for row in rows)} "
        "(`benchmarks/checks/model_sample.py`). Errors are relative L2 against torch on the CPU. A reference is the "
        "definition of an op in CuPy, for steps that no library and no kernel of fusec runs. "
        f"{right} of {len(rows)} models are right and leave nothing to references.",
        header,
        [_cells(row) for row in rows],
    )


def _cells(row: dict[str, Any]) -> list[Any]:
    if "failed" in row:
        return [row["from"], row["model"], "", "", "", "failed", "", row["failed"].replace("|", "\\|")]
    counts = [row[name] for name in ("launches", "steps", "programs")]
    left = ", ".join(f"`{name}`" for name in row["reference"]) or "nothing"
    warned = "; ".join(text.replace("|", "\\|") for text in row["warnings"]) or "none"
    return [row["from"], row["model"], *counts, f"{row['error']:.0e}", left, warned]
