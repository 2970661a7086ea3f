"""Compare training steps with torch's on one GPU, in fp16 with fp32 master weights: the same weights and images.

Usage, on a machine with an NVIDIA GPU, torch and torchvision: python -m benchmarks.models.training [MODEL:BATCH ...]
The losses of some steps are compared first. Then whole steps, each a CUDA graph, are timed in turns. Writes
benchmarks/results/training.json. On any machine, --dry lists the steps of the programs for an H200.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import fusec
from benchmarks.common.result_files import KEYS, gpu_and_torch, parser, write_row
from benchmarks.pages.results_page import slowest_steps
from examples.training_models import LOSS_SCALE, training_step
from fusec import driver
from fusec.passes.partition.cost_model import limit_us
from fusec.runtime import Executable
from fusec.schedule.memory_plan import plan_memory
from fusec.schedule.program import Kind, inputs_of, outputs_of

if TYPE_CHECKING:
    from benchmarks.common.torch_timing import Autotune
    from benchmarks.models.torch_training_steps import Step, Workload

CASES = ["resnet50:64", "vit_b_16:32"]
PEERS = "autocast,half"
STEPS = 5  # whose losses are compared
TOLERANCE = 2e-2  # relative, of a loss


@dataclass(frozen=True)
class Settings:
    """Options that all cases share.

    tune: as `fusec.compile` takes it; empty measures the peers alone.
    budget_s: seconds to time plans.
    once: do not compile a second time with the cached choices.
    cache: folder of choices that were made before; None starts without any.
    peer_s: seconds after which a peer that is not ready is left out; 0 is no limit.
    """

    side: int
    peers: tuple[str, ...]
    autotune: Autotune
    peer_s: float
    tune: str
    budget_s: float
    once: bool
    cache: Path | None


class StageTimes:
    """Print on stderr how long each stage of a compilation takes."""

    def __init__(self) -> None:
        self.stage, self.started = "", time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        stage = stage.split()[0]
        if stage != self.stage:
            now = time.perf_counter()
            if self.stage and now - self.started > 0.2:
                note(f"{self.stage}: {now - self.started:.1f} s")
            self.stage, self.started = stage, now


def note(text: str) -> None:
    print(f"   {text}", file=sys.stderr, flush=True)


def dry(name: str, batch: int, side: int, verbose: bool) -> None:
    """Print the program for an H200.

    verbose: print each step with its bytes and its limit, too.
    """
    b = training_step(name, batch, side)
    started = time.perf_counter()
    state = {p: b.updates.get(p, "") for p in b.parameters}
    compiled = driver.build(b.graph(), target="h200", state=state)
    seconds, program = time.perf_counter() - started, compiled.program
    launches = [step for step in program.steps if step.kind is not Kind.VIEW]
    for index, step in enumerate(launches if verbose else ()):
        mb = sum(v.type.nbytes for v in (*inputs_of(step.nodes), *outputs_of(step.nodes))) / 1e6
        limit = limit_us(step.nodes, compiled.target)
        types = " ".join(str(v.type) for v in step.outputs)
        print(f"{index:5} {step.kind.value:7} {mb:8.2f} MB {limit:7.1f} us  {step.signature[:100]} -> {types[:80]}")
    kinds = {kind.value: sum(s.kind is kind for s in launches) for kind in (Kind.CUDNN, Kind.KERNEL)}
    memory = plan_memory(program, set(program.graph.inputs))
    limit = sum(limit_us(step.nodes, compiled.target) for step in launches) / 1000
    print(f"{name}:{batch}: {len(launches)} launches {kinds}, limit {limit:.3f} ms, ", end="")
    print(f"activations {memory.nbytes >> 20} MB, compiled in {seconds:.1f} s", flush=True)


def run_peer(
    kind: str, workload: Workload, data: Sequence[Any], settings: Settings, row: dict[str, Any]
) -> tuple[Step, Callable[[], None]] | None:
    """Run a peer's first steps and capture one; None if it is not ready in time.

    Returns the step with its replay. The step must live as long as it is replayed, because the graph reads its memory.
    row: gets the losses, the peak memory, and the time to compile.
    """
    import torch

    from benchmarks.common.attempt import TooLongError, within
    from benchmarks.common.torch_timing import captured
    from benchmarks.models.torch_training_steps import Step

    before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    losses: list[float] = []
    try:
        with within(settings.peer_s):
            step = Step(kind, workload, settings.autotune)
            for images, labels in data:
                step.images.copy_(images)
                step.labels.copy_(labels)
                losses.append(float(step.run()))
            torch.cuda.reset_peak_memory_stats()
            step.run()
            row["peak_bytes"][kind] = torch.cuda.max_memory_allocated() - before
            replay, _ = captured(step.run)
    except TooLongError as late:
        row.setdefault("missing", {})[kind] = str(late)
        return None
    replay()
    torch.cuda.synchronize()
    row["losses"][kind] = losses
    note(f"{kind}: {time.perf_counter() - started:.1f} s")
    row[f"{kind}_compile_s"] = round(time.perf_counter() - started, 2)
    return step, replay


def run_fusec(
    name: str, batch: int, first: Mapping[str, Any], data: Sequence[Any], settings: Settings, row: dict[str, Any]
) -> Executable:
    """Compile fusec's step, with an empty cache and again with what that cached, and run the first steps.

    first: the weights to begin with.
    row: gets the losses, and the seconds to the first loss.
    """
    import cupy

    executable: Any = None
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSEC_CACHE"] = str(settings.cache or folder)
        for limit in (settings.budget_s, 0.0)[: 1 if settings.once else 2]:
            del executable
            gc.collect()
            started = time.perf_counter()
            b = training_step(name, batch, settings.side, first)
            executable = fusec.compile(b, tune=settings.tune, budget=limit, progress=StageTimes())
            note(f"compiled after {time.perf_counter() - started:.1f} s")
            losses = [
                float(executable.step(images=cupy.from_dlpack(x), labels=cupy.from_dlpack(y)).get())
                for x, y in data[: STEPS if not seconds else 1]
            ]
            seconds.append(time.perf_counter() - started)
            note(f"fusec: first loss after {seconds[-1]:.1f} s")
            if len(seconds) == 1:
                row["losses"]["fusec"] = losses
    # with a folder of earlier choices, the first compilation is a warm one
    names = ("cold_s", "warm_s") if settings.cache is None else ("warm_s",)
    row |= dict(zip(names, (round(s, 2) for s in seconds), strict=False))
    return executable


def case(name: str, batch: int, settings: Settings) -> dict[str, Any]:
    """Measure a training step with fusec and with the peers."""
    import cupy
    import torch

    from benchmarks.common.torch_timing import best_peer_over_fusec, limits_and_steps, timed
    from benchmarks.models.torch_training_steps import Workload, first_weights
    from fusec.diagnostics.step_times import measure

    weights, side = first_weights(name), settings.side
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
    if any(kind.startswith("compile") for kind in settings.peers):
        row |= {"compile_mode": settings.autotune.mode, "products": settings.autotune.products}
    workload = Workload(name, weights, batch, side, LOSS_SCALE)
    ready = {kind: run_peer(kind, workload, data, settings, row) for kind in settings.peers}
    replays = {kind: one[1] for kind, one in ready.items() if one is not None}
    peers = list(replays)
    feeds = {"images": cupy.from_dlpack(data[-1][0]), "labels": cupy.from_dlpack(data[-1][1])}
    executable = None
    if settings.tune:
        executable = run_fusec(name, batch, first, data, settings, row)
        executable.run(None, feeds)
        replays["fusec"] = executable.replay
    row["times"] = timed(replays, round_s=0.1)
    mean = np.mean([row["losses"][kind] for kind in peers], axis=0) if peers else np.zeros(STEPS)
    row["loss_errors"] = {
        who: float(np.max(np.abs((np.asarray(losses) - mean) / mean))) for who, losses in row["losses"].items()
    }
    row["ok"] = all(e <= TOLERANCE for e in row["loss_errors"].values())
    if executable is not None:
        memory, backend = executable.memory, executable.backend
        parts = [memory.nbytes, executable._constants.nbytes]
        parts += [a.nbytes for a in executable._state.buffers.values()]
        parts += [0 if (workspace := backend.workspace.array) is None else workspace.nbytes]  # type: ignore[attr-defined]  # a GPU's
        parts += [backend.workspace.pool.total_bytes()]  # type: ignore[attr-defined]  # a GPU's
        row["peak_bytes"]["fusec"] = sum(parts)
        row["peak_parts_mb"] = [p >> 20 for p in parts if p >= 1 << 20][:8]
        executable.run(None, feeds)
        row |= {"launches": executable.compiled.program.launches, "in_place": executable.in_place}
        row |= limits_and_steps(measure(executable, feeds, 5))
        row["best_peer_over_fusec"] = best_peer_over_fusec(row["times"], peers)
    return row


def show(row: dict[str, Any], worst: int) -> None:
    """Print a row, and its `worst` slowest kinds of steps."""
    print(f"{'ok ' if row['ok'] else 'BAD'} {row['model']}:{row['batch']}", end="")
    for key in ("best_peer_over_fusec", "launches", "limit_ms", "sum_ms", "cold_s", "warm_s", "in_place"):
        if key in row:
            print(f" {key} {row[key]:.4g}", end="")
    print()
    for who, t in row["times"].items():
        losses = " ".join(f"{v:.4f}" for v in row["losses"][who])
        print(
            f"   {who:16} {t['median_ms']:7.3f} ms ({t['low_ms']:.3f}..{t['high_ms']:.3f}) peak "
            f"{row['peak_bytes'][who] >> 20} MB  compiled in {row.get(who + '_compile_s', '-')} s  losses {losses}"
        )
    for name, kind, count, us, limit in slowest_steps(row.get("steps", []), worst):
        print(f"   {count:4.0f} x {us:8.1f} us, limit {limit:7.1f}  {kind:9} {name[:90]}")
    sys.stdout.flush()


def main() -> int:
    options = parser(__doc__, "training.json", budget=True)
    options.add_argument("cases", nargs="*", default=CASES, help="MODEL:BATCH")
    options.add_argument("--side", type=int, default=224)
    options.add_argument("--peers", default=PEERS, help="of autocast, half, compile-autocast, compile-half")
    options.add_argument("--compile-mode", default="max-autotune-no-cudagraphs", help="mode of torch.compile")
    options.add_argument("--products", default="ATEN,TRITON", help="libraries whose products torch.compile times")
    options.add_argument("--peer-seconds", type=float, default=0.0, help="leave out a slower peer; 0: no limit")
    options.add_argument("--tune", default="quick", help="empty: peers alone")
    options.add_argument("--worst", type=int, default=0, help="number of the slowest kinds of steps to print")
    options.add_argument("--once", action="store_true", help="do not compile again with the cached choices")
    options.add_argument("--cache", type=Path, help="folder of earlier choices; their time then counts as warm")
    options.add_argument("--dry", action="store_true", help="list the steps for an H200; needs no GPU")
    given = options.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    cases = [(name, int(batch)) for name, batch in (item.split(":") for item in given.cases)]
    if given.dry:
        for name, batch in cases:
            dry(name, batch, given.side, bool(given.worst))
        return 0
    import torch

    from benchmarks.common.torch_timing import Autotune, free_memory

    torch.backends.cudnn.benchmark = True
    settings = Settings(
        side=given.side,
        peers=tuple(p for p in given.peers.split(",") if p),
        autotune=Autotune(given.compile_mode, given.products),
        peer_s=given.peer_seconds,
        tune=given.tune,
        budget_s=given.budget,
        once=given.once,
        cache=given.cache,
    )
    fine = True
    for name, batch in cases:
        row = case(name, batch, settings)
        show(row, given.worst)
        write_row(given.output, gpu_and_torch(), given.commit, row, KEYS["training.json"])
        fine = fine and row["ok"]
        free_memory()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
