"""Print the sections of docs/results.md on overhead, start-up, builds, new sizes, and the gain of single choices."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from benchmarks.common.result_files import RESULTS
from benchmarks.kernels.scans import is_one_op


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def table(header: list[str], rows: list[list[Any]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def section(title: str, text: str, header: list[str], rows: list[list[Any]], after: Iterable[str] = ()) -> list[str]:
    """Print a section of the page: a heading, a paragraph, a table, and the lines after it."""
    return [f"## {title}", "", text, "", *table(header, rows), "", *after]


def machine_of(data: dict[str, Any]) -> str:
    """Name the GPU and the libraries of a result file."""
    torch = f", torch {data['torch']}" if "torch" in data else ""
    return f"{data['gpu']}, driver API {data['driver']}, cuDNN {data['cudnn']}{torch}"


def spread(time: dict[str, float], unit: str = "ms", digits: int = 3) -> str:
    """Format a median with its deciles."""
    median, low, high = (f"{time[f'{name}_{unit}']:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def where(data: dict[str, Any]) -> str:
    """Name the machine, and the commits and days of the rows."""
    commits = ", ".join(dict.fromkeys(row["commit"][:10] for row in data["rows"]))
    days = ", ".join(sorted({row["date"] for row in data["rows"]}))
    plural = "s" if "," in commits else ""
    return f"{machine_of(data)}, commit{plural} {commits}, {days}"


def calls() -> list[str]:
    data = read("calls.json")
    kinds = {
        "replay": "replay, with a wait",
        "call": "call",
        "out": "with `out=`",
        "buffers": "from `input_buffers`",
        "buffers, out": "from `input_buffers`, with `out=`",
        "host": "from and to the host",
        "queued": "queued calls",
    }
    rows = [
        [
            row["model"],
            row["batch"],
            f"{row['input_bytes'] / 1e6:.1f} / {row['output_bytes'] / 1e6:.1f}",
            f"{row['steps']['median_us']:.1f}",
            *(spread(row["more"][kind], "us", 1) for kind in kinds),
        ]
        for row in data["rows"]
    ]
    orders = [
        [
            row["model"],
            row["batch"],
            *(f"{row[key]:.1f}" if key in row else "not timed" for key in ("in_order_us", "side_by_side_us")),
            "in parallel" if row["lanes"] > 1 else "in order",
            row["lanes"],
        ]
        for row in data["rows"]
    ]
    worst = max(row["more"]["call"]["median_us"] - row["more"]["replay"]["median_us"] for row in data["rows"])
    return section(
        "Call overhead",
        f"{where(data)}; fp16 (`benchmarks/serving/call_overhead.py`). Steps: replays of the captured graph, queued "
        "one after the other. The next columns show how many microseconds longer a call takes: medians with deciles "
        "of the differences within a turn. The host waits for each call. In the last column, calls are queued like "
        f"the replays. The slowest call takes {worst:.1f} us longer than a replay for which the host waits, too.",
        ["model", "batch", "MB in / out", "steps us", *kinds.values()],
        rows,
        [
            "Steps in order and in parallel, timed in turns at capture:",
            "",
            *table(["model", "batch", "in order us", "in parallel us", "chosen", "streams"], orders),
            "",
        ],
    )


def choices() -> list[str]:
    data = read("choices.json")
    rows: list[list[Any]] = []
    for row in data["rows"]:
        ms = {variant: spread(time) for variant, time in row["times"].items()}
        steps = row["with_steps"]
        chosen = f"{steps['in place']} of {steps['concats']} in place" if "concats" in steps else ""
        chosen = f"{steps['cublaslt']} steps" if "cublaslt" in steps else chosen
        gain = row["times"]["without"]["median_ms"] / row["times"]["with"]["median_ms"]
        rows.append(
            [
                f"`{row['choice']}`",
                row["model"],
                row["batch"],
                row["precision"],
                ms["with"],
                ms["without"],
                f"{gain:.2f}",
                chosen,
            ]
        )
    header = ["choice", "model", "batch", "precision", "with ms", "without ms", "without / with", "chosen"]
    return section(
        "Gain of single choices",
        f"{where(data)}; the same model compiled with a choice and without it (`benchmarks/models/ablation.py`). "
        "Replays take turns; the table shows medians with deciles. If a choice is measured to be slower, fusec does "
        "not take it, and both columns are the same. dense_block: the first dense block of DenseNet-121, between "
        "poolings. resnet_stem: a 7x7 convolution of 3 channels with stride 2, bias and relu. vit_stem: a 16x16 "
        "convolution with stride 16, whose patches become rows. linear_gelu: a matmul of 197 rows per image by "
        "768x3072, with bias and gelu in its erf form.",
        header,
        rows,
    )


def first_result() -> list[str]:
    data = read("first_result.json")
    found = {(row["from"], row["trusted"], row["tune"], row["turn"]): row for row in data["rows"]}
    how = {
        ("model", None): "`fusec.compile` of the ONNX file",
        ("lock", None): "`fusec.compile` with a lock: nothing is timed",
        ("file", True): "`fusec.load` of a file made without a GPU, trusted",
        ("file", False): "`fusec.load` of a file made without a GPU, not trusted",
    }
    rows: list[list[Any]] = []
    for (group, trusted), title in how.items():
        for tune in ("none", "quick"):
            turns = [found.get((group, trusted, tune, turn)) for turn in ("first", "again")]
            if turns[0] is None or turns[1] is None:
                continue
            plans = " / ".join(f"{row['built']}, {row['revived']}" for row in turns if row is not None)
            seconds = [f"{row['first_result_s']:.2f}" for row in turns if row is not None]
            level = "" if group == "lock" else f"`{tune}`"
            rows.append([title, level, *seconds, plans, f"{turns[1]['run_us']:.0f}", f"{turns[1]['error']:.1e}"])
    imports = [row["imports_s"] for row in data["rows"]]
    cores = " or ".join(map(str, sorted({row["cores"] for row in data["rows"]})))
    return section(
        "Start-up time",
        f"{where(data)}, {cores} cores; {data['model']} in {data['precision']}, batch {data['batch']} "
        "(`benchmarks/compile_time/first_result.py`). Seconds from the call of `fusec.compile` or `fusec.load` to the "
        f"first result, each in its own process. Starting Python and imports take another {min(imports):.1f} to "
        f"{max(imports):.1f} s. First: with empty caches of plans and kernels. Again: the next process. Plans: how "
        "many were built, and how many were read from serialized plans, in the first process and the next. Errors are "
        "relative L2 against the reference in fp32.",
        ["how", "tune", "first s", "again s", "plans built, read", "steps us", "error"],
        rows,
    )


def builds() -> list[str]:
    data = read("builds.json")

    def seconds(built: dict[str, Any]) -> str:
        value = built["build_s"]
        return "" if value is None else f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.2f} ms"

    def offered(built: dict[str, Any]) -> str:
        first = f", engine {built['engine']}" if built["engine"] is not None else ""
        ready = f" ({built['precompiled']} precompiled)" if built["precompiled"] else ""
        return f"{built['plans'] or 'none'}{ready}{first}"

    sizes: list[list[Any]] = []
    for row in data["sizes"]:
        first, *rest = row["all sizes"]
        later = max((each["build_s"] or 0.0 for each in rest), default=0.0)
        sizes.append(
            [
                row["graph"],
                offered(row["one size"]),
                seconds(row["one size"]),
                offered(first),
                seconds(first),
                seconds({"build_s": later}) if first["build_s"] is not None else "",
            ]
        )
    lengths = [[row["pointwise"], f"{row['build_s']:.1f}"] for row in data["lengths"]]
    alone = data["alone"]
    by_tensors = [
        [row["pointwise"], row["tensors"], f"{row['build_s']:.2f}", f"{row['build_s'] / row['pointwise']:.3f}"]
        for row in alone["rows"]
    ]
    batches = data["sizes"][0]["batches"]
    return section(
        "Build time of cuDNN plans",
        f"Without a GPU, for an {data['target'].upper()}, cuDNN {data['cudnn']}, fp16, commit {data['commit'][:10]}, "
        f"{data['date']}; processor seconds for the first plan that builds (`benchmarks/compile_time/plan_builds.py`). "
        f"One size: batch size {batches[0]}. All sizes: with dynamic shapes and a kernel cache, for batch size "
        f"{batches[0]} first, then the slower of {' and '.join(map(str, batches[1:]))}.",
        ["graph", "plans for one size", "first build", "plans for all sizes", "first build", "next sizes"],
        sizes,
        [
            "A convolution with pointwise ops after it:",
            "",
            *table(["pointwise ops", "build s"], lengths),
            "",
            f"Pointwise ops alone, of which many store their result: commit {alone['commit'][:10]}, {alone['date']}, "
            f"at a load average of {alone['load']}:",
            "",
            *table(["pointwise ops", "tensors in memory", "build s", "s per op"], by_tensors),
            "",
        ],
    )


def penalties() -> list[str]:
    data = read("penalties.json")
    rows = [
        [
            row["penalty"],
            row["layers"],
            f"{row['us']:.1f}",
            f"{row['without_us']:.1f}",
            f"{row['us'] / row['without_us']:.2f}",
        ]
        for row in data["rows"]
    ]
    return section(
        "The cost model's penalties",
        f"{where(data)}; fp16, the fastest plan of each graph, with a cold cache "
        "(`benchmarks/kernels/fusion_penalties.py`). Depthwise convolutions: the layers of MobileNetV2 at batch 32, "
        "with bias and relu against without. No fast precompiled engine: a convolution of 64 to 256 channels, 56x56, "
        "batch 32, with bias, residual and relu. The bias comes before the residual, against the residual first.",
        ["penalty for", "layers", "us", "without us", "ratio"],
        rows,
    )


def shapes() -> list[str]:
    data = read("shapes.json")
    cases: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        cases.setdefault((row["model"], row["tune"], row["kernels"], row["cache"]), []).append(row)
    kinds = {"size": "transferred", "shared": "transferred, `share_kernels`", "each": "`tune_each`"}
    header = ["model", "tune", "plans", "plan cache", "first size s", "each new size s", "of these, to the program"]
    header += ["padded size s", "runs, us (size: time)"]
    rows: list[list[Any]] = []
    for (model, tune, kernels, cache), found in cases.items():
        first, new = found[0], [row for row in found[1:] if not row["padded"]]
        padded = [f"{row['first_s']:.2f}" for row in found if row["padded"]]
        rows.append(
            [
                model,
                tune,
                kinds[kernels],
                cache,
                f"{first['first_s']:.2f}",
                ", ".join(f"{row['first_s']:.2f}" for row in new),
                ", ".join(f"{row['program_s']:.2f}" for row in new),
                *(padded or [""]),
                ", ".join(f"{'x'.join(map(str, row['size']))}: {row['run_us']:.0f}" for row in [first, *new]),
            ]
        )
    worst = max((row["error"] for row in data["rows"]), default=0.0)
    return section(
        "New sizes of a dynamic model",
        f"{where(data)}; fp16 (`benchmarks/compile_time/new_shapes.py`). Seconds from a call with a new size to its "
        "result. Each row is a process of its own that gets the sizes in this order. The first size includes loading "
        "the libraries. To the program: import, passes, and asking cuDNN. After the first size there is a pause, in "
        "which runtime engines are compiled for all sizes. A padded size runs the program of the next larger size "
        f"([shapes.md](shapes.md)). Results are within {worst:.0e} of torch's in fp32.",
        header,
        rows,
    )


def genstats() -> list[str]:
    data = read("genstats.json")
    (row,) = data["rows"]
    rows = [
        [
            each["convolution"],
            each["count"],
            *(
                "refused" if each[key] is None else f"{each[key]:.1f}"
                for key in ("alone_us", "with_sums_us", "pass_us")
            ),
        ]
        for each in row["convolutions"]
    ]
    taken = [each for each in row["convolutions"] if each["with_sums_us"] is not None]
    totals = [sum(each["count"] * each[key] for each in taken) for key in ("alone_us", "with_sums_us", "pass_us")]
    rows.append(["all supported", sum(each["count"] for each in taken), *(f"{total:.0f}" for total in totals)])
    return section(
        "Statistics by the convolution before the norm",
        f"{where(data)}; the convolutions of a ResNet-50 with a norm after them, batch {row['batch']}, fp16, with a "
        "cold cache (`benchmarks/kernels/genstats.py`). Alone: the fastest plan of the convolution. With sums: the "
        "fastest plan that also gives the sums and sums of squares of each channel (cuDNN's genstats). Reading: the "
        "time to read the result once more, from its bytes.",
        ["convolution", "times", "alone us", "with sums us", "reading us"],
        rows,
        [*_in_a_step()],
    )


def _in_a_step() -> list[str]:
    """Print the times of such convolutions together with the norm's kernel."""
    data = read("channel_sums.json")
    (row,) = data["rows"]
    rows: list[list[Any]] = []
    for each in row["convolutions"]:
        both = [each["with_us"], each["apart_us"]]
        texts = [f"{a:.1f} + {b:.1f} = {a + b:.1f}" for a, b in both]
        rows.append(
            [
                each["convolution"],
                f"{each['bytes'] / 1e6:.0f}",
                *texts,
                "convolution" if sum(both[0]) < sum(both[1]) else "norm",
            ]
        )
    with_ms, without_ms = ("{:.3f} ({:.3f} to {:.3f})".format(*row[name]) for name in ("with_ms", "without_ms"))
    return [
        f"{where(data)}; the same in a training step: the convolution, and the norm's kernel that reads its result "
        "(with the add and relu after it). The sums are computed by the convolution or by the norm's kernel, each with "
        f"its fastest candidate and a cold cache (`benchmarks/kernels/channel_sums.py`). With {row['taken']} "
        f"convolutions that give sums, the whole step takes {with_ms} ms, and {without_ms} ms without any: medians, "
        "minimum and maximum of replays in turns.",
        "",
        *table(["convolution", "result MB", "sums by the convolution us", "sums by the norm us", "faster"], rows),
        "",
    ]


def deformable() -> list[str]:
    data = read("deformable.json")
    header = ["batch, channels, side, filters", "precision", "products a result", "blocks a processor"]
    header += ["kernel us", "launches", "parts us", "launches"]
    rows = [
        [
            row["case"].replace("x", ", "),
            *(row[key] for key in ("precision", "products", "blocks_a_processor")),
            *(row[key] for form in ("kernel", "parts") for key in (f"{form}_us", f"{form}_launches")),
        ]
        for row in data["rows"]
    ]
    return section(
        "Deformable convolutions as a kernel and in parts",
        f"{where(data)}; a call of a masked convolution of 3 x 3 with a relu, inputs and results on the device "
        "(`benchmarks/kernels/deformable.py`). The pass `expand_deform_conv` takes the parts where there are fewer "
        "than two blocks a processor and more than 512 products for each result.",
        header,
        rows,
    )


def scans() -> list[str]:
    data = read("scans.json")
    header = ["loop", "one op us", "launches", "compiled s"]
    header += ["its steps us", "launches", "compiled s", "torch us", "taken"]
    rows = [
        [
            row["case"].replace("x", ", "),
            *(row[f"{form}_{key}"] for form in ("scan", "steps") for key in ("us", "launches", "compile_s")),
            row["torch_us"],
            "one op" if is_one_op(row["case"]) else "its steps",
        ]
        for row in data["rows"]
    ]
    return section(
        "Loops as one op and as the nodes of their steps",
        f"{where(data)}; a call in fp32, inputs and results on the device (`benchmarks/kernels/scans.py`). Numbers "
        "after a name are steps, batch and size. torch runs its loop as a CUDA graph. The last column says what "
        "`compile` takes.",
        header,
        rows,
    )


def digits() -> list[str]:
    header = ["model", "where", "epochs", "correct test images", "as ONNX, reloaded", "goal"]
    header += ["steps s", "all s", "again s", "commit"]
    rows = [
        [
            row["model"],
            row["where"],
            row["epochs"],
            f"{row['accuracy']:.2%}",
            f"{row['reloaded']:.2%}",
            f"{row['goal']:.1%}",
            *(f"{row[key]:.1f}" if key in row else "" for key in ("steps_s", "seconds", "again_s")),
            row["commit"][:7],
        ]
        for row in read("digits.json")["rows"]
    ]
    return section(
        "Handwritten digits by the toy framework",
        "Whole runs of `examples/toy_framework/train_digits.py`, each in its own process "
        "(`benchmarks/models/digits_training.py`). All: from the start of the process to the accuracy of the exported "
        "and reloaded model. Steps: the loop over the epochs. Again: a second run on the GPU, with the plans and "
        "kernels that the first run cached.",
        header,
        rows,
    )


def kernel_times() -> list[str]:
    """Print the section on fusec's own kernels, each alone."""
    data = read("kernel_times.json")
    rows = [
        [
            row["case"],
            f"{row['us']:.1f}",
            ", ".join(f"{us:.1f}" for us in row["variants_us"]),
            f"{row['limit_us']:.1f}",
            f"{row['limit_us'] / row['us']:.0%}",
        ]
        for row in data["rows"]
    ]
    return section(
        "fusec's own kernels",
        f"{where(data)}; fp16 unless named otherwise, each kernel alone with an empty L2 cache "
        "(`benchmarks/kernels/kernel_times.py`). The limit is the time that its bytes take at the GPU's bandwidth. "
        "Where a kernel has variants, the fastest on the GPU at hand is used.",
        ["kernel", "us", "of its variants us", "limit us", "share of the limit"],
        rows,
    )
