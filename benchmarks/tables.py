"""Print docs/results.md from benchmarks/results/*.json: no number in it is typed by hand.

With `--plot`, draw docs/peers.svg as well, for which matplotlib is needed.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.machine import RESULTS
from benchmarks.tables_of_costs import (
    builds,
    calls,
    choices,
    digits,
    first_result,
    genstats,
    penalties,
    read,
    shapes,
    table,
)

LIBRARIES = "ATEN"  # whose products torch.compile chose among, where not also among Triton's


def light_models() -> list[str]:
    data = read("light_models.json")
    machine = data["machine"]
    rows = [
        [
            row["model"].removeprefix("light_"),
            row["launches"],
            f"{row['with_precompiled_plans']} / {row['convolution_partitions']}",
            row["residual_adds_inside"],
            f"{row['compile_s']} / {row['compile_warm_s']}",
            row["simulated_run_s"],
            row["peak_memory_gb"],
            f"{row['error_shipped']:.1e}",
            f"{row['error_random_weights']:.1e}",
            "yes" if row["verified"] else "NO",
        ]
        for row in data["models"]
    ]
    header = [
        "model",
        "steps",
        "precompiled / conv partitions",
        "residual adds inside",
        "compile s cold / warm",
        "simulated run s",
        "peak GB",
        "error, shipped",
        "error, random weights",
        "verified",
    ]
    without = {s for row in data["models"] for s in row["without_precompiled_plans"]}
    note = (
        f"Convolution partitions without a precompiled plan: {', '.join(sorted(without))}."
        if without
        else "Every convolution partition was offered precompiled plans."
    )
    return [
        "## The nine light models without a GPU",
        "",
        f"Target {data['target']}, fp32, cuDNN {data['cudnn']}, {machine['cores']} cores, Python {machine['python']}, "
        f"commit {data['commit'][:10]}, {data['date']}. `import fusec` takes {data['import_s']} s. Errors are "
        "relative L2: against the outputs shipped with the models, and with seeded random weights against "
        "onnxruntime (`benchmarks/light_models.py`). Steps are counted without views. Cold means an empty cache of "
        "verdicts.",
        "",
        *table(header, rows),
        "",
        note,
        "",
    ]


def scaling() -> list[str]:
    data = read("scaling.json")
    rows = [[row["nodes"], row["passes_s"], row["all_s"], row["launches"]] for row in data["graphs"]]
    return [
        "## Compile time by graph size",
        "",
        f"Sequences of convolution, bias, residual add and activation; verdicts cached; {data['cores']} cores, "
        f"commit {data['commit'][:10]}, {data['date']} (`benchmarks/scaling.py`).",
        "",
        *table(["nodes", "passes s", "passes and partitioning s", "steps"], rows),
        "",
    ]


def gpu_models() -> list[str]:
    data = read("gpu_models.json")
    rows = [
        [
            row["model"],
            row["precision"],
            row["launches"],
            row["distinct_cudnn_graphs"],
            f"{row['error']:.1e}",
            f"{row['worst_step_error']:.1e}",
            row["compile_s"],
        ]
        for row in data["models"]
    ]
    return [
        "## Models on a GPU",
        "",
        f"{data['gpu']}, driver API {data['driver']}, cuDNN {data['cudnn']}, torch {data['torch']}, commit "
        f"{data['commit'][:10]}, {data['date']}. Outputs against torch in float64 (torchvision's models, random "
        "weights and BatchNorm statistics, batch 2) or onnxruntime (light models); every distinct cuDNN graph was "
        "also run alone against its simulation (`benchmarks/gpu_models.py`). Compile time starts with an empty cache: "
        "it includes cuDNN's verdicts and the choice of plans.",
        "",
        *table(
            ["model", "precision", "steps", "distinct cuDNN graphs", "error", "worst step", "compile s"],
            rows,
        ),
        "",
    ]


def _mark(row: dict[str, Any], who: str) -> str:
    """Behind a time of torch.compile that had fewer products to choose from."""
    return " *" if who.startswith("compile") and row.get("products") == LIBRARIES else ""


def _beside(row: dict[str, Any], who: str, ms: dict[str, str]) -> str:
    """A peer's time in the run, or why there is none, and that in another run."""
    found = row.get("elsewhere", {}).get(who)
    other = "" if found is None else f"({found['median_ms']:.3f} at {found['commit']})"
    return " ".join(said for said in (ms.get(who), other) if said) or row.get("missing", {}).get(who, "not run")


def _marked(data: dict[str, Any]) -> str:
    if not any(_mark(row, who) for row in data["rows"] for who in row["times"]):
        return ""
    return "*: without Triton's matrix products, because autotuning them did not end in time. "


def _turned(data: dict[str, Any]) -> str:
    if not any(row.get("inputs") == "channels last" for row in data["rows"]):
        return ""
    return "†: fusec's inputs and outputs are channels last, too; in the other rows they are row-major. "


def peers() -> list[str]:
    data = read("peers.json")
    measured = {who for row in data["rows"] for who in row["times"]}
    how = {
        "eager": ("torch eager", "Torch eager runs in a CUDA graph, channels last, with cudnn.benchmark. "),
        "compile": ("torch.compile", "torch.compile has max-autotune and freezing, in a CUDA graph. "),
    }
    names = {who: title for who, (title, _) in how.items() if who in measured}
    rows: list[list[Any]] = []
    for row in data["rows"]:
        ms = {who: f"{t['median_ms']:.3f} ({t['low_ms']:.3f} to {t['high_ms']:.3f})" for who, t in row["times"].items()}
        ms = {who: shown + _mark(row, who) for who, shown in ms.items()}
        rows.append(
            [
                row["model"] + (f" ({row['commit']})" if "commit" in row else ""),
                row["batch"],
                ms["fusec"] + ("†" if row.get("inputs") == "channels last" else ""),
                *(_beside(row, who, ms) for who in names),
                f"{row['best_peer_over_fusec']:.2f}",
                f"{row['limit_ms']:.3f}",
                f"{row['cold_s']} / {row['warm_s']}",
                *("/".join(str(row["peak_bytes"].get(who, 0) >> 20) for who in ("fusec", "eager")),),
                f"{row['errors']['fusec']:.0e} / {row['errors']['eager']:.0e}",
            ]
        )
    header = [
        "model",
        "batch",
        "fusec ms",
        *(f"{title} ms" for title in names.values()),
        "best peer / fusec",
        "limit ms",
    ]
    header += ["cold / warm s", "peak MB fusec/eager", "error fusec / eager"]
    return [
        "## Compared with torch on one GPU",
        "",
        f"{data['gpu']}, driver API {data['driver']}, cuDNN {data['cudnn']}, torch {data['torch']}, commit "
        f"{data['commit'][:10]}, {data['date']}; fp16, the same weights and inputs, medians with deciles of "
        f"turns in random order (`benchmarks/peers.py`). {''.join(how[who][1] for who in names)}Limit: the roofline of "
        "the steps. Cold: from the model's bytes to the first result with empty caches, plans timed. Warm: with "
        "cached choices. Errors are relative L2 against torch in fp32. A commit after a model: the row was measured at "
        f"that commit. {_marked(data)}{_turned(data)}{data.get('note', '')}".rstrip(),
        "",
        "![medians](peers.svg)",
        "",
        *table(header, rows),
        "",
    ]


def training() -> list[str]:
    data = read("training.json")
    titles = {
        "autocast": "torch, autocast",
        "half": "torch, fp16 parameters",
        "compile-autocast": "torch.compile, autocast",
        "compile-half": "torch.compile, fp16 parameters",
    }
    measured = [who for who in titles if any(who in row["times"] for row in data["rows"])]
    rows: list[list[Any]] = []
    for row in data["rows"]:
        ms = {who: f"{t['median_ms']:.2f} ({t['low_ms']:.2f} to {t['high_ms']:.2f})" for who, t in row["times"].items()}
        ms = {who: shown + _mark(row, who) for who, shown in ms.items()}
        found = row["peak_bytes"]
        peaks = "/".join(str(found[who] >> 20) if who in found else "-" for who in ("fusec", *measured))
        missing = row.get("missing", {})
        rows.append(
            [
                row["model"] + (f" ({row['commit'][:10]})" if row.get("commit") else ""),
                row["batch"],
                ms["fusec"],
                *(ms.get(who, missing.get(who, "not run")) for who in measured),
                f"{row['best_peer_over_fusec']:.2f}",
                f"{row['limit_ms']:.2f}",
                row["launches"],
                f"{row.get('cold_s', 'not run')} / {row.get('warm_s', 'not run')}",
                peaks,
                f"{row['loss_errors']['fusec']:.0e}",
            ]
        )
    header = ["model", "batch", "fusec ms", *(f"{titles[who]} ms" for who in measured), "best peer / fusec", "limit ms"]
    header += ["launches", "first loss s cold / warm", f"peak MB fusec/{'/'.join(measured)}", "losses differ by"]
    slowest: list[str] = []
    for row in data["rows"]:
        groups: dict[tuple[str, str], list[float]] = {}
        for step in row["steps"]:
            held = groups.setdefault((step["kind"], step["step"]), [0.0, 0.0, 0.0])
            for place, value in enumerate((1.0, step["us"], step["limit_us"])):
                held[place] += value
        ranked = sorted(groups.items(), key=lambda item: -item[1][1])[:8]
        lines = [
            [f"`{name[:70]}`", kind, int(n), f"{us:.0f}", f"{limit:.0f}"] for (kind, name), (n, us, limit) in ranked
        ]
        slowest += [f"The slowest steps of {row['model']}, timed alone:", ""]
        slowest += [*table(["steps", "run by", "times", "us", "limit us"], lines), ""]
    return [
        "## Training steps compared with torch on one GPU",
        "",
        f"{data['gpu']}, driver API {data['driver']}, cuDNN {data['cudnn']}, torch {data['torch']}, commit "
        f"{data['commit'][:10]}, {data['date']}; 224x224 images, fp16 with fp32 master weights, loss "
        "scaling that skips steps with gradients that are not finite; ResNet-50 with SGD and momentum, ViT-B/16 with "
        "AdamW. Each is a CUDA graph of the whole step, torch channels last with fused optimisers; medians with "
        "deciles of turns in random order "
        "(`benchmarks/training.py`). Losses: the worst relative difference to the mean of torch's over five steps on "
        f"the same data. {_marked(data)}{data.get('note', '')}".rstrip(),
        "",
        *table(header, rows),
        "",
        *slowest,
    ]


def plot() -> None:
    """docs/peers.svg, with matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fusec"
    from matplotlib import pyplot as plt

    rows = read("peers.json")["rows"]
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(rows) + 1))
    colours = {"fusec": "#76b900", "eager": "#bbbbbb", "compile": "#777777"}
    for place, row in enumerate(reversed(rows)):
        least = row["times"]["fusec"]["median_ms"]
        for shift, (who, colour) in zip((0.27, 0.0, -0.27), colours.items(), strict=True):
            if who in row["times"]:
                time = row["times"][who]
                spread = [
                    [(time["median_ms"] - time["low_ms"]) / least],
                    [(time["high_ms"] - time["median_ms"]) / least],
                ]
                axes.barh(place + shift, time["median_ms"] / least, 0.25, color=colour, xerr=spread)
    axes.set_yticks(range(len(rows)), [f"{row['model']} b{row['batch']}" for row in reversed(rows)])
    axes.set_xlabel("time, fusec = 1 (green: fusec, light grey: torch eager, dark grey: torch.compile)")
    axes.axvline(1.0, color="black", linewidth=0.5)
    figure.tight_layout()
    figure.savefig(RESULTS.parent.parent / "docs" / "peers.svg", metadata={"Date": None})


def main() -> str:
    what = "This page shows how fast fusec is, how long it takes to compile, and how exact its results are."
    how = "`python -m benchmarks.tables --plot > docs/results.md` writes it from the result files of the scripts below."
    head = ["# Measured results", "", what, how, ""]
    costs = {"calls": calls, "choices": choices, "first_result": first_result, "penalties": penalties}
    costs |= {"genstats": genstats, "shapes": shapes}
    measured = [line for name, section in costs.items() if (RESULTS / f"{name}.json").exists() for line in section()]
    on_gpu = [*peers(), *training(), *digits(), *measured, *gpu_models()]
    return "\n".join([*head, *on_gpu, *light_models(), *scaling(), *builds()]).rstrip() + "\n"


if __name__ == "__main__":
    if "--plot" in sys.argv[1:]:
        plot()
    print(main(), end="")
