"""fusec beside torch on one GPU, in fp16, in one process: the same weights, the same inputs, the outputs compared.

Usage, on a machine with an NVIDIA GPU, torch and torchvision: python benchmarks/peers.py [MODEL:BATCH ...]
Peers: torch eager with channels_last and cudnn.benchmark in a CUDA graph; torch.compile max-autotune with freezing,
in a CUDA graph, too. All are timed in turns, in random order, over inputs that stay where they are. Torch has its
images channels last; so has fusec, for the models listed.
Writes benchmarks/results/peers.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
warnings.filterwarnings("ignore", category=DeprecationWarning)

import cupy  # noqa: E402  # the repository must be on the path first
import torch  # noqa: E402
from contest import PRODUCTS, TooLongError, autotuned, captured, timed, within  # noqa: E402
from machine import gpu, made  # noqa: E402
from zoo import exported, halved, make  # noqa: E402

import fusec  # noqa: E402
from fusec.cli.step_times import measure  # noqa: E402
from fusec.runtime import Executable  # noqa: E402

CASES = [
    *("resnet50:1", "resnet50:32", "resnet50:256", "mobilenet_v2:32", "efficientnet_b0:32", "densenet121:32"),
    *("convnext_tiny:32", "unet:8", "hourglass:1", "hourglass:32"),
    *("vit_b_16:32", "bert_base:1", "bert_base:32", "gpt2:8", "llama_block:1", "whisper_base:8", "diffusion_block:2"),
]
# fusec's images lie channels last, as torch's do; those of the others in rows, as the exported model takes them
CHANNELS_LAST = {"unet", "hourglass", "diffusion_block", "mobilenet_v2", "efficientnet_b0"}
PEERS = ("eager", "compile")
TOLERANCE = 2e-2  # of a whole model in fp16


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def peer(
    name: str, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], products: str
) -> tuple[Callable[[], None], torch.Tensor]:
    if name == "eager":
        return captured(lambda: model(*inputs))
    fast = autotuned(model, freezing=True, products=products)
    return captured(lambda: fast(*inputs))


def case(
    name: str,
    batch: int,
    peers: list[str],
    tune: str,
    budget: float,
    peer_s: float,
    products: str,
    channels_last: bool,
) -> dict[str, Any]:
    model, inputs = make(name, batch)
    model, inputs = model.cuda(), tuple(x.cuda() for x in inputs)
    with torch.inference_mode():
        want = model(*inputs).clone()
    model, inputs = model.half(), tuple(map(halved, inputs))
    data = exported(model, inputs)
    turned = tuple(x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs)
    feeds = {f"x{i}": cupy.from_dlpack(x) for i, x in enumerate(turned if channels_last else inputs)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSEC_CACHE"] = folder  # nothing is known beforehand
        executable, y, cold_s = first_result(data, feeds, tune, budget, channels_last)
        _, _, warm_s = first_result(data, feeds, tune, 0.0, channels_last)  # what was chosen, as far as the budget went
    row: dict[str, Any] = {"model": name, "batch": batch, "launches": executable.compiled.program.launches}
    if channels_last:
        row["inputs"] = "channels last"
    row |= {"cold_s": round(cold_s, 2), "warm_s": round(warm_s, 2)}
    if executable.spent is not None:
        row["cold_parts_s"] = {what: round(spent.seconds, 2) for what, spent in executable.spent.stages.items()}
    row["errors"] = {"fusec": error(y, want)}
    contenders: dict[str, Callable[[], None]] = {"fusec": executable.replay}
    model = model.to(memory_format=torch.channels_last)
    inputs = turned
    row["peak_bytes"] = {}
    with torch.inference_mode():
        for one in peers:
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            try:
                with within(peer_s):
                    contenders[one], out = peer(one, model, inputs, products)
            except TooLongError as late:
                row.setdefault("missing", {})[one] = str(late)
                continue
            row[f"{one}_compile_s"] = round(time.perf_counter() - started, 2)
            if one == "compile":
                row["products"] = products
            contenders[one]()
            row["errors"][one] = error(out, want)
            row["peak_bytes"][one] = torch.cuda.max_memory_allocated()
        row["times"] = timed(contenders)
        if not all(bool((executable.input_buffers[name] == array).all()) for name, array in feeds.items()):
            raise RuntimeError("replays ran over other inputs")
        executable.run(None, feeds)  # the first call may have left the library with another stream
        bench = measure(executable, feeds, 10)
    memory = executable.memory
    row["peak_bytes"]["fusec"] = memory.nbytes + executable._constants.nbytes
    row |= {"limit_ms": bench.limit_us / 1000, "sum_ms": bench.sum_us / 1000, "call_us": bench.call.median_us}
    row["call_more_us"] = bench.more.median_us
    row["lanes"], row["recorded_otherwise_us"], _, _ = executable.recorded
    row["arena_over_live"] = memory.nbytes / max(1, memory.live_bytes)
    row["ok"] = all(e <= TOLERANCE for e in row["errors"].values())
    ms = {one: time["median_ms"] for one, time in row["times"].items()}
    row["best_peer_over_fusec"] = min((ms[p] for p in peers if p in ms), default=float("nan")) / ms["fusec"]
    row["steps"] = [
        {"step": s.signature, "kind": s.kind, "us": round(s.time.median_us, 2), "limit_us": round(s.limit_us, 2)}
        for s in bench.steps
    ]
    return row


def first_result(
    data: bytes, feeds: dict[str, Any], tune: str, budget: float, channels_last: bool
) -> tuple[Executable, torch.Tensor, float]:
    """A compiled model, its answer, and the seconds from one to the other."""
    started = time.perf_counter()
    executable = fusec.compile(data, precision="fp16", tune=tune, budget=budget, channels_last=channels_last)
    executable.hold_inputs()  # as the peers do
    (y,) = executable.run(None, feeds)
    executable.backend.finish()
    return executable, torch.from_dlpack(y), time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--tune", default="quick")
    parser.add_argument("--budget", type=float, default=float("inf"))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    parser.add_argument("--peer-seconds", type=float, default=0.0, help="left out if not ready by then; 0: no limit")
    parser.add_argument("--products", default=PRODUCTS, help="whose matrix products torch.compile chooses among")
    parser.add_argument("--images", choices=("listed", "rows", "last"), default="listed", help="how fusec's lie")
    parser.add_argument("--commit", default="")
    parser.add_argument("--worst", type=int, default=0, help="print so many of the slowest steps")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    result = {**made(arguments.commit), **gpu(), "rows": rows}
    for item in arguments.cases:
        name, batch = item.split(":")
        peers = [p for p in arguments.peers.split(",") if p]
        limits = arguments.budget, arguments.peer_seconds
        last = arguments.images == "last" or (arguments.images == "listed" and name in CHANNELS_LAST)
        row = case(name, int(batch), peers, arguments.tune, *limits, arguments.products, last)
        rows.append(row)
        shown = "  ".join(
            f"{who} {t['median_ms']:.3f} ({t['low_ms']:.3f}..{t['high_ms']:.3f}) e {row['errors'][who]:.0e}"
            for who, t in row["times"].items()
        )
        print(
            f"{'ok ' if row['ok'] else 'BAD'} {item:18} {shown}  x{row['best_peer_over_fusec']:.2f} limit "
            f"{row['limit_ms']:.3f} sum {row['sum_ms']:.3f} cold {row['cold_s']} "
            f"warm {row['warm_s']} launches {row['launches']}{' channels last' if last else ''}",
            flush=True,
        )
        for step in sorted(row["steps"], key=lambda s: -s["us"])[: arguments.worst]:
            print(f"      {step['us']:8.1f} {step['limit_us']:7.1f} {step['kind']:7} {step['step'][:100]}")
        # after each row: what was measured stays if the rest does not get to run
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        del row
        gc.collect()
        torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
