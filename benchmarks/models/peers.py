"""Compare fusec with torch and XLA on one GPU in fp16: the same weights and inputs.

Usage, on a machine with an NVIDIA GPU, torch, torchvision, timm, transformers and JAX: python -m
benchmarks.models.peers [MODEL:BATCH ...]. The peers are torch eager with cudnn.benchmark, torch.compile with
max-autotune and freezing, and XLA. `--peers eager,xla` measures these alone. Torch runs in a CUDA graph. XLA runs the
exported ONNX as a JAX function in a process of its own (`benchmarks/models/xla_peer.py`); its time is that of many
queued runs, divided by their number, because JAX gives no CUDA graph to replay. All contenders take turns in random
order, over inputs that stay in place. The peers' images are channels last. So are fusec's, for the models in
CHANNELS_LAST. `--levels none,full` also times programs of these tuning levels. Writes benchmarks/results/peers.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

import fusec
from benchmarks.common.attempt import TooLongError, within
from benchmarks.common.model_zoo import channels_last, feeds_of, make, on_gpu, with_channels_last
from benchmarks.common.result_files import KEYS, gpu_and_torch, parser, write_row
from benchmarks.common.torch_timing import (
    PRODUCTS,
    Autotune,
    autotuned,
    best_peer_over_fusec,
    captured,
    free_memory,
    limits_and_steps,
    relative_l2,
    timed,
)
from benchmarks.models.xla_peer import XlaError, XlaPeer
from fusec.diagnostics.step_times import measure
from fusec.runtime import Executable

CASES = [
    *("resnet50:1", "resnet50:32", "resnet50:256", "mobilenet_v2:32", "efficientnet_b0:32", "densenet121:32"),
    *("convnext_tiny:32", "unet:8", "hourglass:1", "hourglass:32"),
    *("vit_b_16:32", "bert_base:1", "bert_base:32", "gpt2:8", "llama_block:1", "whisper_base:8", "diffusion_block:2"),
    *("swin_t:32", "resnext50_32x4d:32", "r3d_18:8", "deeplabv3_resnet50:8", "hrnet_w18:32", "edsr:4"),
    *("segformer_b0:8", "wav2vec2_base:8", "shufflenet_v2_x1_0:32", "inception_v3:32"),
]
# fusec takes these models' images channels last, as torch does. It takes those of the others row-major, as exported.
CHANNELS_LAST = {"unet", "hourglass", "diffusion_block", "mobilenet_v2", "efficientnet_b0"}
PEERS = ("eager", "compile", "xla")
TOLERANCE = 2e-2  # relative L2 of a whole model in fp16


@dataclass(frozen=True)
class Settings:
    """Options that all cases share.

    tune, budget_s: as `fusec.compile` takes them.
    peer_s: seconds after which a peer that is not ready is left out; 0 is no limit.
    products: libraries whose matrix products torch.compile times.
    levels: other tuning levels of fusec, whose programs take turns with its own.
    """

    peers: tuple[str, ...]
    tune: str
    budget_s: float
    peer_s: float
    products: str
    levels: tuple[str, ...]


def peer(
    name: str, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], products: str
) -> tuple[Callable[[], None], torch.Tensor]:
    """Capture a peer as a CUDA graph; return its replay and its output."""
    if name == "eager":
        return captured(lambda: model(*inputs))
    fast = autotuned(model, Autotune(products=products, freezing=True))
    return captured(lambda: fast(*inputs))


def case(name: str, batch: int, nhwc: bool, settings: Settings) -> dict[str, Any]:
    """Measure a model.

    nhwc: fusec takes images channels last, too.
    """
    model, inputs, data, want = on_gpu(*make(name, batch))
    images = channels_last(inputs)
    feeds = feeds_of(images if nhwc else inputs)
    del inputs  # because peak memory counts what is alive
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSEC_CACHE"] = folder  # an empty cache
        executable, y, cold_s = first_result(data, feeds, settings.tune, settings.budget_s, nhwc)
        _, _, warm_s = first_result(data, feeds, settings.tune, 0.0, nhwc)  # with the cached choices
    row: dict[str, Any] = {"model": name, "batch": batch, "launches": executable.compiled.program.launches}
    if nhwc:
        row["inputs"] = "channels last"
    row |= {"cold_s": round(cold_s, 2), "warm_s": round(warm_s, 2)}
    if executable.spent is not None:
        row["cold_parts_s"] = {what: round(spent.seconds, 2) for what, spent in executable.spent.stages.items()}
    row["errors"] = {"fusec": relative_l2(y, want)}
    row["peak_bytes"] = {}
    contenders: dict[str, Callable[[], None]] = {"fusec": executable.replay}
    spans: dict[str, Callable[[int], float]] = {}
    row["levels"] = {}
    for level in settings.levels:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FUSEC_CACHE"] = folder
            other, y, level_s = first_result(data, feeds, level, settings.budget_s, nhwc)
        row["levels"][level] = {"cold_s": round(level_s, 2)}
        row["errors"][level], contenders[level] = relative_l2(y, want), other.replay
    model = with_channels_last(model)
    with torch.inference_mode(), ExitStack() as processes:
        for one in settings.peers:
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            try:
                with within(settings.peer_s):
                    if one == "xla":
                        xla = processes.enter_context(XlaPeer(data, [x.cpu().numpy() for x in images]))
                        spans[one], row[one], out = xla.span, xla.about, torch.tensor(xla.output, device="cuda")
                    else:
                        contenders[one], out = peer(one, model, images, settings.products)
            except (TooLongError, XlaError) as reason:
                row.setdefault("missing", {})[one] = str(reason)
                continue
            row[f"{one}_compile_s"] = round(time.perf_counter() - started, 2)
            if one == "compile":
                row["products"] = settings.products
            if one in contenders:
                contenders[one]()
                row["peak_bytes"][one] = torch.cuda.max_memory_allocated()
            row["errors"][one] = relative_l2(out, want)
        row["times"] = timed(contenders, spans=spans)
    for level in settings.levels:
        row["levels"][level] |= row["times"].pop(level)
    with torch.inference_mode():
        if not all(bool((executable.input_buffers[name] == array).all()) for name, array in feeds.items()):
            raise RuntimeError("the inputs changed while replays were timed")
        executable.run(None, feeds)  # because the first call may have left the library with another stream
        bench = measure(executable, feeds, 10)
    memory = executable.memory
    row["peak_bytes"]["fusec"] = memory.nbytes + executable._constants.nbytes
    row |= {"call_us": bench.call.median_us, "call_more_us": bench.more.median_us}
    row["lanes"], row["recorded_otherwise_us"], _, _ = executable.recorded
    row["arena_over_live"] = memory.nbytes / max(1, memory.live_bytes)
    row["ok"] = all(e <= TOLERANCE for e in row["errors"].values())
    row["best_peer_over_fusec"] = best_peer_over_fusec(row["times"], settings.peers)
    return row | limits_and_steps(bench)


def first_result(
    data: bytes, feeds: dict[str, Any], tune: str, budget: float, nhwc: bool, rounding: str = "fused"
) -> tuple[Executable, torch.Tensor, float]:
    """Compile a model and call it. Return it with its result, and the seconds that both took."""
    started = time.perf_counter()
    executable = fusec.compile(data, precision="fp16", tune=tune, budget=budget, channels_last=nhwc, rounding=rounding)
    executable.hold_inputs()  # as the peers do
    (y,) = executable.run(None, feeds)
    executable.backend.finish()
    return executable, torch.from_dlpack(y), time.perf_counter() - started


def show(row: dict[str, Any], worst: int) -> None:
    """Print a row, and its `worst` slowest steps."""
    shown = "  ".join(
        f"{who} {t['median_ms']:.3f} ({t['low_ms']:.3f}..{t['high_ms']:.3f}) e {row['errors'][who]:.0e}"
        for who, t in row["times"].items()
    )
    print(
        f"{'ok ' if row['ok'] else 'BAD'} {row['model']}:{row['batch']} {shown}  x{row['best_peer_over_fusec']:.2f} "
        f"limit {row['limit_ms']:.3f} sum {row['sum_ms']:.3f} cold {row['cold_s']} warm {row['warm_s']} "
        f"launches {row['launches']} {row.get('inputs', '')}",
        flush=True,
    )
    for step in sorted(row["steps"], key=lambda s: -s["us"])[:worst]:
        print(f"      {step['us']:8.1f} {step['limit_us']:7.1f} {step['kind']:7} {step['step'][:100]}")


def main() -> int:
    options = parser(__doc__, "peers.json", budget=True)
    options.add_argument("cases", nargs="*", default=CASES, help="MODEL:BATCH")
    options.add_argument("--peers", default=",".join(PEERS), help="the peers to measure, separated by commas")
    options.add_argument("--tune", default="quick")
    options.add_argument("--peer-seconds", type=float, default=0.0, help="leave out a slower peer; 0: no limit")
    options.add_argument("--products", default=PRODUCTS, help="libraries whose products torch.compile times")
    options.add_argument("--levels", default="none", help="other tuning levels to time, separated by commas")
    images = {"listed": "channels last for CHANNELS_LAST", "rows": "row-major", "last": "channels last"}
    options.add_argument("--images", choices=images, default="listed", help=f"fusec's images: {images}")
    options.add_argument("--worst", type=int, default=0, help="number of the slowest steps to print")
    given = options.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.backends.cudnn.benchmark = True
    peers = tuple(p for p in given.peers.split(",") if p)
    if unknown := set(peers) - set(PEERS):
        options.error(f"--peers takes {', '.join(PEERS)}, not {', '.join(sorted(unknown))}")
    levels = tuple(level for level in given.levels.split(",") if level)
    settings = Settings(peers, given.tune, given.budget, given.peer_seconds, given.products, levels)
    machine, ok = gpu_and_torch(), True
    for item in given.cases:
        name, batch = item.split(":")
        nhwc = given.images == "last" or (given.images == "listed" and name in CHANNELS_LAST)
        row = case(name, int(batch), nhwc, settings)
        show(row, given.worst)
        write_row(given.output, machine, given.commit, row, KEYS["peers.json"])  # a later row may fail
        ok = ok and row["ok"]
        free_memory()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
