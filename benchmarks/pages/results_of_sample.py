"""Show the sample of exported models: what was compiled, how exact it is, and what is left to references."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.results_of_costs import machine_of, read, section


def model_sample() -> list[str]:
    """Return the section of docs/results.md about benchmarks/results/model_sample.json."""
    data = read("model_sample.json")
    run = f"run in simulation of {data['target']}, without a GPU"
    return _section("A sample of exported models", data, run)


def model_sample_gpu() -> list[str]:
    """Return the section of docs/results.md about benchmarks/results/model_sample_gpu.json."""
    data = read("model_sample_gpu.json")
    run = f"run on {machine_of(data)}, step by step and as the replay of a capture"
    return _section("Models of the sample on a GPU", data, run)


def _section(title: str, data: dict[str, Any], run: str) -> list[str]:
    """Print the section of a result file. run: says where and how the models are run."""
    rows: list[dict[str, Any]] = sorted(data["rows"], key=lambda row: (row["from"], row["model"], row["precision"]))
    names = (
        ("torchvision", "timm", "transformers") if "gpu" in data else ("torch", "torchvision", "timm", "transformers")
    )
    libraries = ", ".join(f"{name} {data[name]}" for name in names if name in data)
    commits = sorted({row["commit"][:7] for row in rows})
    header = ["from", "model", "precision", "launches", "steps", "programs", "error", "left to references", "warnings"]
    return section(
        title,
        "Small configurations with random weights, exported by torch's ONNX exporter. They are compiled without timing "
        f"and {run}; {libraries}; commit {', '.join(commits)}, {max(row['date'] for row in rows)} "
        "(`benchmarks/checks/model_sample.py`). Errors are relative L2 against torch on the CPU, in fp32. "
        "A reference is the definition of an op in CuPy, for steps that no library and no kernel of fusec runs. "
        f"{_right(rows)} and leave nothing to references.",
        header,
        [_cells(row) for row in rows],
    )


def _right(rows: list[dict[str, Any]]) -> str:
    """Count the models that are right in each precision."""
    counts: dict[str, list[bool]] = {}
    for row in rows:
        counts.setdefault(row["precision"], []).append(row["ok"])
    each = [f"{sum(right)} of {len(right)} models are right in {precision}" for precision, right in counts.items()]
    return " and ".join(each)


def _cells(row: dict[str, Any]) -> list[Any]:
    case = [row["from"], row["model"], row["precision"]]
    if "failed" in row:
        return [*case, "", "", "", "failed", "", row["failed"].replace("|", "\\|")]
    counts = [row[name] for name in ("launches", "steps", "programs")]
    left = ", ".join(f"`{name}`" for name in row["reference"]) or "nothing"
    warned = "; ".join(text.replace("|", "\\|") for text in row["warnings"]) or "none"
    return [*case, *counts, f"{row['error']:.0e}", left, warned]
