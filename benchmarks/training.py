"""Training steps beside torch on one GPU, fp16 with fp32 master weights: the same weights, the same images.

Usage, on a machine with an NVIDIA GPU, torch and torchvision: python benchmarks/training.py [MODEL:BATCH ...]
Losses of some steps are compared first; then whole steps, each a CUDA graph, are timed in turns. Writes
benchmarks/results/training.json. Anywhere: --dry lists the steps of the programs for an H200.
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

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
warnings.filterwarnings("ignore", category=DeprecationWarning)

import fusec  # noqa: E402  # the repository must be on the path first
from examples.training_models import LOSS_SCALE, training_step  # noqa: E402
from fusec import driver  # noqa: E402
from fusec.passes.partition.cost_model import limit_us  # noqa: E402
from fusec.schedule.memory_plan import plan_memory  # noqa: E402
from fusec.schedule.program import Kind, inputs_of, outputs_of  # noqa: E402

CASES = ["resnet50:64", "vit_b_16:32"]
PEERS = "autocast,half"
STEPS = 5  # whose losses are compared
TOLERANCE = 2e-2  # of a loss, relative


class Stages:
    """Says on stderr how long each stage of compiling took."""

    def __init__(self) -> None:
        self.stage, self.started = "", time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        stage = stage.split()[0]
        if stage != self.stage:
            now = time.perf_counter()
            if self.stage and now - self.started > 0.2:
                print(f"   {self.stage}: {now - self.started:.1f} s", file=sys.stderr, flush=True)
            self.stage, self.started = stage, now


def dry(name: str, batch: int, side: int, shown: bool) -> None:
    """The program as an H200 would run it: what each step is, its bytes and its limit."""
    b = training_step(name, batch, side)
    started = time.perf_counter()
    state = {p: b.updates.get(p, "") for p in b.parameters}
    compiled = driver.build(b.graph(), target="h200", state=state)
    seconds, program = time.perf_counter() - started, compiled.program
    works = [step for step in program.steps if step.kind is not Kind.VIEW]
    for index, step in enumerate(works if shown else ()):
        mb = sum(v.type.nbytes for v in (*inputs_of(step.nodes), *outputs_of(step.nodes))) / 1e6
        limit = limit_us(step.nodes, compiled.target)
        types = " ".join(str(v.type) for v in step.outputs)
        print(f"{index:5} {step.kind.value:7} {mb:8.2f} MB {limit:7.1f} us  {step.signature[:100]} -> {types[:80]}")
    kinds = {kind.value: sum(s.kind is kind for s in works) for kind in (Kind.CUDNN, Kind.KERNEL)}
    memory = plan_memory(program, set(program.graph.inputs))
    limit = sum(limit_us(step.nodes, compiled.target) for step in works) / 1000
    print(f"{name}:{batch}: {len(works)} launches {kinds}, limit {limit:.3f} ms, ", end="")
    print(f"activations {memory.nbytes >> 20} MB, compiled in {seconds:.1f} s", flush=True)


def case(
    name: str,
    batch: int,
    side: int,
    peers: list[str],
    tune: str,
    budget: float,
    once: bool,
    cache: Path | None,
    compile_mode: str,
    products: str,
    peer_s: float,
) -> dict[str, Any]:
    import cupy
    import torch
    from contest import TooLongError, captured, timed, within
    from torch_steps import Step, first_weights

    from fusec.cli.step_times import measure

    weights = first_weights(name)
    first = {key: value.numpy() for key, value in weights.items()}
    generator = torch.Generator().manual_seed(1)
    data = [
        (
            torch.randn(batch, 3, side, side, generator=generator).half().cuda(),
            torch.randint(0, 1000, (batch,), generator=generator).cuda(),
        )
        for _ in range(STEPS)
    ]
    row: dict[str, Any] = {"model": name, "batch": batch, "losses": {}, "peak_bytes": {}}
    if any(kind.startswith("compile") for kind in peers):
        row |= {"compile_mode": compile_mode, "products": products}
    contenders: dict[str, Callable[[], None]] = {}
    kept: dict[str, Step] = {}  # what a graph reads must live as long as it is replayed
    for kind in peers:
        before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        losses: list[float] = []
        try:
            with within(peer_s):
                step = kept[kind] = Step(kind, name, weights, batch, side, LOSS_SCALE, compile_mode, products)
                for images, labels in data:
                    step.images.copy_(images)
                    step.labels.copy_(labels)
                    losses.append(float(step.run()))
                torch.cuda.reset_peak_memory_stats()
                step.run()
                row["peak_bytes"][kind] = torch.cuda.max_memory_allocated() - before
                contenders[kind], _ = captured(step.run)
        except TooLongError as late:
            row.setdefault("missing", {})[kind] = str(late)
            continue
        contenders[kind]()
        torch.cuda.synchronize()
        row["losses"][kind] = losses
        print(f"   {kind}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        row[f"{kind}_compile_s"] = round(time.perf_counter() - started, 2)
    feeds = {"images": cupy.from_dlpack(data[-1][0]), "labels": cupy.from_dlpack(data[-1][1])}
    executable = None
    if tune:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FUSEC_CACHE"] = str(cache or folder)  # nothing is known beforehand, unless a cache is given
            seconds: list[float] = []
            for limit in (budget, 0.0)[: 1 if once else 2]:
                del executable
                gc.collect()
                started = time.perf_counter()
                b = training_step(name, batch, side, first)
                executable = fusec.compile(b, tune=tune, budget=limit, progress=Stages())
                print(f"   compiled after {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
                losses = [
                    float(executable.step(images=cupy.from_dlpack(x), labels=cupy.from_dlpack(y)).get())
                    for x, y in data[: STEPS if not seconds else 1]
                ]
                seconds.append(time.perf_counter() - started)
                print(f"   fusec: first loss after {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
                if len(seconds) == 1:
                    row["losses"]["fusec"] = losses
        said = ("cold_s", "warm_s") if cache is None else ("warm_s",)  # the first with what was chosen before
        row |= dict(zip(said, (round(s, 2) for s in seconds), strict=False))
        executable.run(None, feeds)
        contenders["fusec"] = executable.replay
    row["times"] = timed(contenders, round_s=0.1)
    peers = [kind for kind in peers if kind in contenders]
    wanted = np.mean([row["losses"][kind] for kind in peers], axis=0) if peers else np.zeros(STEPS)
    row["loss_errors"] = {
        who: float(np.max(np.abs((np.asarray(found) - wanted) / wanted))) for who, found in row["losses"].items()
    }
    row["ok"] = all(e <= TOLERANCE for e in row["loss_errors"].values())
    if executable is not None:
        memory, backend = executable.memory, executable.backend
        parts = [memory.nbytes, executable._constants.nbytes]
        parts += [a.nbytes for a in executable._state_buffers.values()]
        parts += [0 if backend._workspace is None else backend._workspace.nbytes]  # type: ignore[attr-defined]  # a GPU's
        parts += [backend._pool.total_bytes()]  # type: ignore[attr-defined]  # a GPU's
        row["peak_bytes"]["fusec"] = sum(parts)
        row["peak_parts_mb"] = [p >> 20 for p in parts if p >= 1 << 20][:8]
        executable.run(None, feeds)
        bench = measure(executable, feeds, 5)
        row |= {"launches": executable.compiled.program.launches, "in_place": executable.in_place}
        row |= {"limit_ms": bench.limit_us / 1000, "sum_ms": bench.sum_us / 1000}
        ms = {one: time["median_ms"] for one, time in row["times"].items()}
        row["best_peer_over_fusec"] = min((ms[p] for p in peers), default=float("nan")) / ms["fusec"]
        row["steps"] = [
            {"step": s.signature, "kind": s.kind, "us": round(s.time.median_us, 2), "limit_us": round(s.limit_us, 2)}
            for s in bench.steps
        ]
    return row


def show(row: dict[str, Any], worst: int) -> None:
    print(f"{'ok ' if row['ok'] else 'BAD'} {row['model']}:{row['batch']}", end="")
    for key in ("best_peer_over_fusec", "launches", "limit_ms", "sum_ms", "cold_s", "warm_s", "in_place"):
        if key in row:
            print(f" {key} {row[key]:.4g}", end="")
    print()
    for who, t in row["times"].items():
        losses = " ".join(f"{v:.4f}" for v in row["losses"][who])
        print(
            f"   {who:16} {t['median_ms']:7.3f} ms ({t['low_ms']:.3f}..{t['high_ms']:.3f}) peak "
            f"{row['peak_bytes'][who] >> 20} MB  made in {row.get(who + '_compile_s', '-')} s  losses {losses}"
        )
    steps = row.get("steps", [])
    groups: dict[tuple[str, str], list[float]] = {}
    for step in steps:
        held = groups.setdefault((step["kind"], step["step"]), [0.0, 0.0, 0.0])
        for place, value in enumerate((1.0, step["us"], step["limit_us"])):
            held[place] += value
    for (kind, name), (count, us, limit) in sorted(groups.items(), key=lambda g: -g[1][1])[:worst]:
        print(f"   {count:4.0f} x {us:8.1f} us, limit {limit:7.1f}  {kind:9} {name[:90]}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, help="MODEL:BATCH")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--compile-mode", default="max-autotune-no-cudagraphs", help="of torch.compile")
    parser.add_argument("--products", default="ATEN,TRITON", help="whose matrix products torch.compile chooses among")
    parser.add_argument("--peer-seconds", type=float, default=0.0, help="left out if not ready by then; 0: no limit")
    parser.add_argument("--tune", default="quick", help="empty: peers alone")
    parser.add_argument("--budget", type=float, default=float("inf"))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "training.json")
    parser.add_argument("--commit", default="")
    parser.add_argument("--worst", type=int, default=0, help="print so many of the slowest kinds of steps")
    parser.add_argument("--once", action="store_true", help="do not compile again to see how long that takes warm")
    parser.add_argument("--cache", type=Path, help="a folder of choices made before; their time is then no cold one")
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    cases = [(name, int(batch)) for name, batch in (item.split(":") for item in arguments.cases)]
    if arguments.dry:
        for name, batch in cases:
            dry(name, batch, arguments.side, bool(arguments.worst))
        return 0
    import cupy
    import torch
    from machine import gpu, made

    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    result = {**made(arguments.commit), **gpu(), "rows": rows}
    peers = [p for p in arguments.peers.split(",") if p]
    for name, batch in cases:
        row = case(
            name,
            batch,
            arguments.side,
            peers,
            arguments.tune,
            arguments.budget,
            arguments.once,
            arguments.cache,
            arguments.compile_mode,
            arguments.products,
            arguments.peer_seconds,
        )
        rows.append(row)
        show(row, arguments.worst)
        # after each row: what was measured stays if the rest does not get to run
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
