"""Print docs/results.md from benchmarks/results/*.json, so that no figure in it is typed by hand.

`--plot` also draws docs/peers.svg; it needs matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.common.result_files import RESULTS
from benchmarks.pages.results_of_costs import (
    builds,
    calls,
    choices,
    deformable,
    digits,
    first_result,
    genstats,
    kernel_times,
    machine_of,
    penalties,
    read,
    scans,
    section,
    shapes,
    spread,
    table,
)
from benchmarks.pages.results_of_decoders import decoders, detectors, recurrent, serving, several_gpus
from benchmarks.pages.results_of_quantised import packed_products, quantized_models
from benchmarks.pages.results_of_sample import model_sample, model_sample_gpu
from benchmarks.pages.results_of_tuning import tuning

VIEWS = {"slice", "split", "reshape", "transpose"}  # left out of a step's name in a cell
LONGEST = 48  # characters of that name
LIBRARIES = "ATEN"  # torch.compile's products if it did not time Triton's


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
    return section(
        "The nine light models without a GPU",
        f"Target {data['target']}, fp32, cuDNN {data['cudnn']}, {machine['cores']} cores, Python {machine['python']}, "
        f"commit {data['commit'][:10]}, {data['date']}. `import fusec` takes {data['import_s']} s. Errors are "
        "relative L2: against the outputs shipped with the models, and with seeded random weights against "
        "onnxruntime (`benchmarks/checks/light_models.py`). Steps are counted without views. Cold means an empty cache "
        "of verdicts.",
        header,
        rows,
        [note, ""],
    )


def scaling() -> list[str]:
    data = read("scaling.json")
    rows = [[row["nodes"], row["passes_s"], row["all_s"], row["launches"]] for row in data["graphs"]]
    return section(
        "Compile time by graph size",
        f"Sequences of convolution, bias, residual add and activation; verdicts cached; {data['cores']} cores, "
        f"commit {data['commit'][:10]}, {data['date']} (`benchmarks/compile_time/graph_size.py`).",
        ["nodes", "passes s", "passes and partitioning s", "steps"],
        rows,
    )


def compile_time() -> list[str]:
    data = read("compile_time.json")
    rows = [
        [
            row["case"],
            row["processes"],
            row["compile_s"],
            row.get("save_s", ""),
            row.get("weights_s", ""),
            row["cpu_s"],
            f"{row['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in row else "",
            f"{row['file_bytes'] / 1e9:.2f}" if "file_bytes" in row else "",
            row["load"],
            f"{row['date']} {row['commit'][:10]}",
        ]
        for row in data["rows"]
    ]
    names = ["case", "processes", "compile s", "save s", "weights s", "processor s", "peak GB", "file GB", "load"]
    return section(
        "Compile time and memory without a GPU",
        f"Without a GPU, for {data['target']}; {data['cores']} cores, Python {data['python']} "
        "(`benchmarks/compile_time/time_and_memory.py`). `import` is the time of `fusec --version`. `pointwise N` is a "
        "random graph of N unary and binary ops over mixed shapes. The weights are 16 fp32 matrices of 67 MB each, or "
        "64 of 17 MB in 8 bits; precision is fp32 where none is given. No sources: the file is saved without the "
        "weights that only the imported model has. Warm: another process has filled the cache. Weights s is the time "
        "to read and convert the weights, as a GPU needs them. encoder is a transformer of 12 layers with 340 MB of "
        "weights; vgg19 has 575 MB. Of several processes that start together, the table shows the slowest. Processor "
        "seconds are those of all processes, and count the making of a graph, not of a file. `load` is the load "
        "average: where it exceeds the cores, others slowed the run.",
        [*names, "date and commit"],
        rows,
    )


def warm_start() -> list[str]:
    data = read("warm_start.json")
    rows = [
        [
            row["model"],
            f"{row['weights_bytes'] / 1e6:.0f}",
            row["turn"],
            row["compile_s"],
            row["first_result_s"],
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in _longest(row["stages_s"])),
            row["imports_s"],
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['date']} {row['commit'][:10]}",
        ]
        for row in data["rows"]
    ]
    names = ["model", "MB", "start", "compile s", "first result s", "longest stages s", "imports s", "peak GB"]
    return section(
        "Cold and warm starts",
        f"{machine_of(data)}; fp16 (`benchmarks/compile_time/warm_start.py`). Seconds from the call of `fusec.compile` "
        "to its return, and to the first result. Cold: with empty caches of plans and kernels. Warm: the next "
        "processes, of which the table shows the median. Saved file: `fusec.load` of the first process's program in "
        "the next ones. MB is the size of the ONNX file, peak the memory on the host.",
        [*names, "date and commit"],
        rows,
    )


def _longest(stages: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(stages.items(), key=lambda item: -item[1])[:4]


def _where(data: dict[str, Any]) -> str:
    return f"{machine_of(data)}, commit {data['commit'][:10]}, {data['date']}"


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
    return section(
        "Models on a GPU",
        f"{_where(data)} (`benchmarks/checks/gpu_models.py`). Outputs are compared with torch's in float64 "
        "(torchvision's models with random weights and statistics, batch 2) or with onnxruntime's (light models). Each "
        "distinct cuDNN graph also runs alone and is compared with its simulation. Compile time starts with an empty "
        "cache: it includes cuDNN's verdicts and the choice of plans.",
        ["model", "precision", "steps", "distinct cuDNN graphs", "error", "worst step", "compile s"],
        rows,
    )


def _mark(row: dict[str, Any], who: str) -> str:
    """Mark a time of torch.compile that did not time Triton's products."""
    return " *" if who.startswith("compile") and row.get("products") == LIBRARIES else ""


def _peer_ms(row: dict[str, Any], who: str, ms: dict[str, str]) -> str:
    """Return a peer's times in this run and in another run, or why there are none."""
    found = row.get("elsewhere", {}).get(who)
    other = "" if found is None else f"({found['median_ms']:.3f} at {found['commit'][:7]})"
    return " ".join(time for time in (ms.get(who), other) if time) or row.get("missing", {}).get(who, "not run")


def _products_note(data: dict[str, Any]) -> str:
    if not any(_mark(row, who) for row in data["rows"] for who in row["times"]):
        return ""
    return "*: without Triton's matrix products, because autotuning them did not end in time. "


def _channels_last_note(data: dict[str, Any]) -> str:
    if not any(row.get("inputs") == "channels last" for row in data["rows"]):
        return ""
    return "†: fusec's inputs and outputs are channels last, too; in the other rows they are row-major. "


def _again(row: dict[str, Any]) -> str:
    """Return the time of a later run without peers."""
    return f"; {row['again']['median_ms']:.3f} at {row['again']['commit'][:7]}" if "again" in row else ""


def _again_note(data: dict[str, Any]) -> str:
    if not any("again" in row for row in data["rows"]):
        return ""
    return "A second time of fusec is that of a later run without peers, at the commit named next to it. "


def _best_peer(row: dict[str, Any], names: Mapping[str, str]) -> str:
    """Return how much faster fusec is than the fastest peer, and which that is, also if another run timed it."""
    times = row.get("elsewhere", {}) | row["times"]
    ms = {who: times[who]["median_ms"] for who in names if who in times}
    best = min(ms, key=ms.__getitem__)
    other = "" if best in row["times"] else ", in another run"
    return f"{ms[best] / row['times']['fusec']['median_ms']:.2f} ({names[best]}{other})"


def peers() -> list[str]:
    data = read("peers.json")
    measured = {who for row in data["rows"] for who in (*row["times"], *row.get("elsewhere", ()))}
    jax = sorted({row["xla"]["jax"] for row in data["rows"] if "xla" in row})
    how = {
        "eager": ("torch eager", "Torch eager runs in a CUDA graph, channels last, with cudnn.benchmark. "),
        "compile": ("torch.compile", "torch.compile has max-autotune and freezing, in a CUDA graph. "),
        "xla": (
            "XLA",
            f"XLA (JAX {', '.join(jax)}) runs the same ONNX as a JAX function, images channels last, batch norms "
            "folded, in a process of its own: many queued runs divided by their number, each alone or ten in a loop "
            "on the device, and attention plain or cuDNN's, whichever is fastest. ",
        ),
    }
    names = {who: title for who, (title, _) in how.items() if who in measured}
    rows: list[list[Any]] = []
    for row in data["rows"]:
        ms = {who: spread(time) + _mark(row, who) for who, time in row["times"].items()}
        rows.append(
            [
                row["model"] + (f" ({row['commit'][:7]})" if "commit" in row else ""),
                row["batch"],
                ms["fusec"] + ("†" if row.get("inputs") == "channels last" else "") + _again(row),
                *(_peer_ms(row, who, ms) for who in names),
                _best_peer(row, names),
                f"{row['limit_ms']:.3f}",
                f"{row['cold_s']} / {row['warm_s']}",
                *("/".join(str(row["peak_bytes"].get(who, 0) >> 20) for who in ("fusec", "eager")),),
                " / ".join(f"{row['errors'][who]:.0e}" for who in ("fusec", "eager") if who in row["errors"]),
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
    steps = [
        [row["model"], row["batch"], *(_against_limit(step) for step in worst_steps(row["steps"], 3))]
        for row in data["rows"]
    ]
    return [
        "## Compared with torch and XLA on one GPU",
        "",
        f"{_where(data)}; fp16, the same weights and inputs (`benchmarks/models/peers.py`). The table shows medians "
        f"with deciles; all take turns in random order. {''.join(how[who][1] for who in names)}Limit: the roofline of "
        "the steps. Cold: from the model's bytes to the first result with empty caches, with timing of plans. Warm: "
        "with cached choices. Errors are relative L2 against torch in fp32. A commit after a model: the row was "
        f"measured at that commit. {_products_note(data)}{_channels_last_note(data)}{_again_note(data)}"
        f"{data.get('note', '')}".rstrip(),
        "",
        "![medians](peers.svg)",
        "",
        *table(header, rows),
        "",
        "The steps of each model that exceed their limits most, in us: equal steps together, each timed alone, "
        "and their limits.",
        "",
        *table(["model", "batch", "worst", "second", "third"], steps),
        "",
    ]


def _against_limit(step: tuple[str, str, int, float, float]) -> str:
    name, kind, count, us, limit = step
    ops = "+".join(op for op in name.split("+") if op not in VIEWS) or name
    shown = ops if len(ops) <= LONGEST else f"{ops[: LONGEST - 1]}…"
    times = f" × {count}" if count > 1 else ""
    return f"`{shown}`{times}, {kind}: {us:.1f}, limit {limit:.1f}"


def training() -> list[str]:
    data = read("training.json")
    titles = {
        "autocast": "torch, autocast",
        "half": "torch, fp16 parameters",
        "compile-autocast": "torch.compile, autocast",
        "compile-half": "torch.compile, fp16 parameters",
    }
    known = {who for row in data["rows"] for who in (*row["times"], *row.get("elsewhere", ()))}
    measured = [who for who in titles if who in known]
    rows: list[list[Any]] = []
    for row in data["rows"]:
        ms = {who: spread(time, digits=2) + _mark(row, who) for who, time in row["times"].items()}
        found = row["peak_bytes"]
        peaks = "/".join(str(found[who] >> 20) if who in found else "-" for who in ("fusec", *measured))
        rows.append(
            [
                row["model"] + (f" ({row['commit'][:10]})" if row.get("commit") else ""),
                row["batch"],
                ms["fusec"],
                *(_peer_ms(row, who, ms) for who in measured),
                _best_peer(row, {who: titles[who] for who in measured}),
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
        lines = [
            [f"`{name[:70]}`", kind, count, f"{us:.0f}", f"{limit:.0f}"]
            for name, kind, count, us, limit in slowest_steps(row["steps"], 8)
        ]
        slowest += [f"The slowest steps of {row['model']}, timed alone:", ""]
        slowest += [*table(["steps", "run by", "times", "us", "limit us"], lines), ""]
    return section(
        "Training steps compared with torch on one GPU",
        f"{_where(data)}; 224x224 images, fp16 with fp32 master weights (`benchmarks/models/training.py`). Loss "
        "scaling skips steps with gradients that are not finite. ResNet-50 has SGD with momentum, ViT-B/16 has AdamW. "
        "Each step is one CUDA graph. Torch uses channels last and fused optimisers. The table shows medians with "
        "deciles; all take turns in random order. Losses: the worst relative difference to the mean of torch's losses, "
        "over five steps "
        f"on the same data. {_products_note(data)}{data.get('note', '')}".rstrip(),
        header,
        rows,
        [*slowest],
    )


def slowest_steps(steps: list[dict[str, Any]], count: int) -> list[tuple[str, str, int, float, float]]:
    """Sum up equal steps; return name, kind, number, time and limit in us of those that take the most time together."""
    return sorted(_summed(steps), key=lambda row: -row[3])[:count]


def worst_steps(steps: list[dict[str, Any]], count: int) -> list[tuple[str, str, int, float, float]]:
    """Return what `slowest_steps` does of those that exceed their limits most, together and in us."""
    return sorted(_summed(steps), key=lambda row: row[4] - row[3])[:count]


def _summed(steps: list[dict[str, Any]]) -> list[tuple[str, str, int, float, float]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for step in steps:
        groups.setdefault((step["step"], step["kind"]), []).append(step)
    return [
        (name, kind, len(equal), sum(s["us"] for s in equal), sum(s["limit_us"] for s in equal))
        for (name, kind), equal in groups.items()
    ]


def plot() -> None:
    """Draw docs/peers.svg."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fusec"
    from matplotlib import pyplot as plt

    rows = read("peers.json")["rows"]
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(rows) + 1))
    colours = {"fusec": "#76b900", "eager": "#bbbbbb", "compile": "#777777", "xla": "#333333"}
    for place, row in enumerate(reversed(rows)):
        least = row["times"]["fusec"]["median_ms"]
        for shift, (who, colour) in zip((0.3, 0.1, -0.1, -0.3), colours.items(), strict=True):
            if who in row["times"]:
                time = row["times"][who]
                spread = [
                    [(time["median_ms"] - time["low_ms"]) / least],
                    [(time["high_ms"] - time["median_ms"]) / least],
                ]
                axes.barh(place + shift, time["median_ms"] / least, 0.18, color=colour, xerr=spread)
    axes.set_yticks(range(len(rows)), [f"{row['model']} b{row['batch']}" for row in reversed(rows)])
    axes.set_xlabel("time, fusec = 1 (green: fusec, greys from light to dark: torch eager, torch.compile, XLA)")
    axes.axvline(1.0, color="black", linewidth=0.5)
    figure.tight_layout()
    figure.savefig(RESULTS.parent.parent / "docs" / "peers.svg", metadata={"Date": None})


def main() -> str:
    """Print the page."""
    what = "This page shows how fast fusec is, how long it takes to compile, and how exact its results are."
    command = "python -m benchmarks.pages.results_page --plot > docs/results.md"
    how = f"`{command}` writes it from the result files of the scripts below."
    head = ["# Measured results", "", what, how, ""]
    costs = {"calls": calls, "choices": choices, "first_result": first_result}
    costs |= {"warm_start": warm_start, "penalties": penalties}
    costs |= {"deformable": deformable, "genstats": genstats, "shapes": shapes}
    costs |= {"quantized_models": quantized_models, "packed_products": packed_products}
    costs |= {"decoders": decoders, "recurrent": recurrent, "detectors": detectors}
    costs |= {"kernel_times": kernel_times, "scans": scans, "model_sample": model_sample}
    costs |= {"model_sample_gpu": model_sample_gpu}
    costs |= {"serving": serving, "scale": several_gpus}
    measured = [line for name, section in costs.items() if (RESULTS / f"{name}.json").exists() for line in section()]
    on_gpu = [*peers(), *tuning(), *training(), *digits(), *measured, *gpu_models()]
    return "\n".join([*head, *on_gpu, *light_models(), *scaling(), *compile_time(), *builds()]).rstrip() + "\n"


if __name__ == "__main__":
    if "--plot" in sys.argv[1:]:
        plot()
    print(main(), end="")
