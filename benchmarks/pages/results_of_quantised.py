"""Print the sections of docs/results.md on quantised models, and on products with packed weights."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.results_of_costs import read, section, spread, where

LOSSES = 3  # groups of steps that are listed for a model


def quantized_models() -> list[str]:
    """Print the section on quantised models. Rows of a run that was stopped have no second form, and are left out."""
    data = read("quantized_models.json")
    complete = [row for row in data["rows"] if "fp16_over_quantised" in row]
    if not complete:
        return []
    rows = [
        [
            row["model"],
            row["batch"],
            row["format"],
            spread(row["times"][row["format"]]),
            spread(row["times"]["fp16"]),
            f"{row['fp16_over_quantised']:.2f}",
            f"{row['limit_ms']:.3f}" if "limit_ms" in row else "",
            f"{row[row['format'] + '_launches']} / {row['fp16_launches']}",
            f"{row[row['format'] + '_cold_s']:.1f} / {row['fp16_cold_s']:.1f}",
        ]
        for row in complete
    ]
    header = [
        "model",
        "batch",
        "format",
        "quantised ms",
        "fp16 ms",
        "fp16 / quantised",
        "limit ms",
        "launches",
        "cold s",
    ]
    return section(
        "Quantised models compared with fp16",
        f"{where(data)}. Both forms are compiled by fusec, captured as CUDA graphs, and timed in turns "
        "(`benchmarks/models/quantized_models.py`). Weights and calibration data are random. Launches and seconds of a "
        "cold compilation are of the quantised form / of fp16. The limit is that of the quantised form's steps.",
        [*header, "launches", "cold s"],
        rows,
        [*(line for row in complete for line in _losses(row))],
    )


def _losses(row: dict[str, Any]) -> list[str]:
    """List the operators at which the quantised form loses most, where steps of both forms were paired."""
    form = row["format"]
    paired = [pair for pair in row.get("pairs", []) if pair["fp16"]["us"]]
    losses = [pair for pair in paired if pair[form]["us"] > pair["fp16"]["us"]][:LOSSES]
    if not losses:
        return []
    lines = [
        f"- `{' & '.join(pair[form]['steps']) or 'no step'}`: {pair[form]['us']:.1f} µs, limit "
        f"{pair[form]['limit_us']:.1f}; in fp16 {pair['fp16']['us']:.1f}"
        for pair in losses
    ]
    return [
        f"Steps of {row['model']} b{row['batch']} in {form}, timed alone, that take longest against fp16:",
        "",
        *lines,
        "",
    ]


def packed_products() -> list[str]:
    """Print the section on products with packed weights. Cases that were not compared in turns are left out."""
    data = read("packed_products.json")
    rows: list[list[Any]] = []
    for row in data["rows"]:
        if "times" in row:
            shape, bits, block = row["case"].split(":")
            times = [f"{row['us'][name]:.2f}" for name in ("packed", "fp16", "torch")]
            ratios = [f"{row[name]:.2f}" for name in ("fp16_over_packed", "torch_over_packed")]
            rows.append([shape, bits, block, *times, f"{row['share_of_limit']:.0%}", *ratios])
    if not rows:
        return []
    header = ["rows x depth x columns", "bits", "block", "packed µs", "fp16 µs", "torch fp16 µs"]
    return section(
        "Products with packed weights",
        f"{where(data)}. A case is a chain of products, there and back, whose weights exceed the L2 cache; times are "
        "of one product (`benchmarks/kernels/packed_products.py`). The limit is that of reading the packed weights and "
        "their scales.",
        [*header, "share of the limit", "fp16 / packed", "torch / packed"],
        rows,
    )
