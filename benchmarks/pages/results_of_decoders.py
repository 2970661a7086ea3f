"""Print the sections of docs/results.md on decoders, recurrent layers, detectors, servers and several GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.pages.results_of_costs import read, section, spread, where


def decoders() -> list[str]:
    """Print the section on tokens and prompts of a Llama-like decoder. A peer that was not ready in time is named."""
    data = read("decoders.json")
    rows: list[list[Any]] = []
    for row in sorted(data["rows"], key=lambda row: (-row["bits"], row["batch"])):
        for part, prefix in (("token", ""), ("prompt", "prompt_")):
            if (times := row.get(f"{prefix}times")) is None:
                continue
            limit, ours = row[f"{prefix}limit_ms"], times["fusec"]["median_ms"]
            peers = [f"{peer} {spread(time)}" for peer, time in times.items() if peer != "fusec"]
            ratio = row[f"{prefix}best_peer_over_fusec"] or math.inf
            if part == "token":
                others = row.get("elsewhere", {})
                peers += [f"{who} ({one['median_ms']:.3f} at {one['commit'][:7]})" for who, one in others.items()]
                ratio = min([ratio, *(one["median_ms"] / ours for one in others.values())])
            if part == "prompt" and (commit := row.get("prompt_commit")):
                part += f" (at {commit[:7]})"
            size = [row["layers"], row["batch"], row["bits"], part]
            rows.append(
                [
                    *size,
                    spread(times["fusec"]),
                    "; ".join(peers + late(row)),
                    f"{ratio:.2f}",
                    f"{limit:.3f}",
                    f"{limit / ours:.0%}",
                ]
            )
    header = ["layers", "batch", "bits", "of", "fusec ms", "torch ms", "best peer / fusec", "limit ms", "limit / fusec"]
    return section(
        "Decoders compared with torch",
        f"{where(data)}. A Llama-like decoder, 4,096 wide, with a cache of 2,048 tokens that is nearly full "
        "(`benchmarks/models/decoders.py`). All run as CUDA graphs and take turns. With 4 bits, torch has the weights "
        "in fp16. `compile` is torch.compile of a whole step, `layers` that of one layer, which all layers use. A time "
        "of another run has its commit, and so has a prompt; the best peer may be one of these. The limit is the time "
        "to read weights and cache once, for a prompt also that of the arithmetic.",
        header,
        rows,
    )


def late(row: Mapping[str, Any]) -> list[str]:
    """Print the peers of a row that were not ready in time, each with its limit."""
    return [f"{peer}: {why}" for peer, why in row.get("missing", {}).items()]


def recurrent() -> list[str]:
    """Print the section on recurrent layers."""
    data = read("recurrent.json")
    rows = [
        [
            row["case"],
            row["launches"],
            f"{row['compile_s']:.1f}",
            spread(row["times"]["fusec"]),
            spread(row["times"]["torch"]),
            f"{row['torch_over_fusec']:.2f}",
        ]
        for row in data["rows"]
    ]
    return section(
        "Recurrent layers compared with torch",
        f"{where(data)}. Three layers of 512, 400 steps, batch 16, fp16 (`benchmarks/models/recurrent.py`). torch "
        "calls cuDNN's recurrent layers.",
        ["layers", "launches", "cold s", "fusec ms", "torch ms", "torch / fusec"],
        rows,
    )


def detectors() -> list[str]:
    """Print the section on detectors, from images to the boxes that suppression leaves."""
    data = read("detectors.json")
    rows = [
        [
            row["model"],
            row["batch"],
            row["launches"],
            *(spread(row[what]["fusec"]) for what in ("times", "on_device")),
            "; ".join(
                [*(f"{peer} {spread(time)}" for peer, time in row["times"].items() if peer != "fusec"), *late(row)]
            ),
            f"{row['best_peer_over_fusec']:.2f}",
            f"{row['compile_s']:.1f}",
        ]
        for row in data["rows"]
    ]
    header = ["model", "batch", "launches", "fusec ms", "of these, on the device", "torch ms", "best peer / fusec"]
    return section(
        "Detectors compared with torch",
        f"{where(data)}. From images of 640² on the GPU to the boxes that non-maximum suppression leaves, by "
        "the host's clock (`benchmarks/models/detectors.py`).",
        [*header, "cold s"],
        rows,
    )


def serving() -> list[str]:
    """Print the section on `fusec serve` under load."""
    data = read("serving.json")
    rows = [
        [
            row["model"],
            row["rows"],
            "shared memory" if row["shared_memory"] else "HTTP",
            f"{row['device_images_s']:,.0f}",
            f"{row['images_s']:,.0f}",
            f"{row['of_device']:.0%}",
            f"{row['load_images_s']:,.0f}",
            f"{row['load_median_ms']:.1f} / {row['load_p99_ms']:.1f}",
            row["refused"],
        ]
        for row in data["rows"]
        if "load_p99_ms" in row
    ]
    header = ["model", "images a request", "through", "executable, images/s", "server, images/s", "share"]
    return section(
        "A server under load",
        f"{where(data)}. Clients and server share the cores of one machine (`benchmarks/serving/server_load.py`). "
        "Images are 224² bytes, and preprocessing is part of the model. The server forms the batches. Latencies are "
        "those at 70 % of the full load, from when a request was due.",
        [*header, "at 70 %, images/s", "median / p99 ms", "refused"],
        rows,
    )


PARTS = {
    "pool": "pool, fp16",
    "bytes": "pool, bytes",
    "dask": "Dask, files of bytes",
    "train": "training",
    "overlap": "training, gradients sent early",
}


def several_gpus() -> list[str]:
    """Print the section on pools, Dask and training on several GPUs."""
    data = read("scale.json")
    rows = [
        [
            PARTS[row["case"]] + (", written to memory that workers share" if shared else ""),
            row["model"],
            row["batch"],
            row["devices"],
            f"{row[f'one_{shared}images_per_s']:,.0f}",
            f"{row[f'{shared}images_per_s']:,.0f}",
            f"{row[f'{shared}over_one']:.2f}",
            f"{row['error']:.0e}" if row.get("error") else "the same" if "error" in row else "not compared",
        ]
        for row in data["rows"]
        for shared in ("", "shared_")
        if f"{shared}over_one" in row
    ]
    header = ["case", "model", "batch a GPU", "GPUs", "one GPU, images/s", "all, images/s", "all / one", "difference"]
    return section(
        "Several GPUs",
        f"{where(data)} (`benchmarks/serving/several_gpus.py`). Images of inference come from the host's memory. The "
        "difference is that of results, or for training that of losses from those of one GPU with the whole batch."
        + "".join(
            f" Dask's time is that of one call for {row['files']} files of {row['rows_a_file']:,} images each, "
            "which are in the host's memory, until all results are written."
            for row in data["rows"]
            if "files" in row
        ),
        header,
        rows,
    )
