"""Run the checks of a change to lowering, kernels or runtime on all GPUs of this machine, within a time for each.

Usage: python -m benchmarks.checks.gpu_evidence DIR PHASE:SECONDS [...] [--seed N] [--commit HASH]
Phases: `fuzz` (`device_agrees` and `kernels_agree`, fresh graphs), `suite` (onnx's suite), `tests` (`pytest -m gpu`),
`times` (each model of benchmarks.models.peers without its peers) and `cpu` (the properties that need no GPU). They run
one after the other; phases joined by a comma, as in `suite,tests:200`, run at the same time. Each GPU has processes and
a cache folder of its own, because many processes with one cache wait for each other. Fuzzers draw graphs until 45 s
before the end of their phase, because their workers need that time to stop. Reports, findings, logs and summary.txt go
to DIR. What still runs at the end of a phase is stopped. The exit status is 1 if a phase found something or was cut.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KERNELS = ("--property", "kernels_agree", "--graphs", "fusec.testing.strategies:kernel_graphs")
FOLDERS = ("gpu", "quantization", "quantized", "regressions", "repro", "scale", "session", "testing", "torch_backend")
SHARD = "TEST_SHARD"  # "1/4": the second quarter of the tests
GRACE_S = 45  # for a fuzzer to stop its workers and to report after its time


@dataclass
class Machine:
    """The GPUs and cores of this machine, and the folder for results."""

    folder: Path
    gpus: int
    cores: int
    seed: int
    commit: str
    lines: list[str] = field(default_factory=list[str])
    failed: bool = False

    @property
    def share(self) -> int:
        """Return the cores for each GPU."""
        return max(1, self.cores // self.gpus)

    def say(self, line: str, *, failed: bool = False) -> None:
        self.lines.append(line)
        self.failed = self.failed or failed
        print(line, flush=True)

    def run(self, name: str, gpu: int | None, command: Sequence[str], seconds: float, **env: str) -> int | None:
        """Run Python with these arguments; return its status, or None if it was stopped.

        Its results go to NAME.out, all else that it prints to NAME.log.
        """
        own = {"FUSEC_CACHE": str(self.folder / "cache" / name), "OMP_NUM_THREADS": "1", **env}
        if gpu is not None:
            own["CUDA_VISIBLE_DEVICES"] = str(gpu)
        with (self.folder / f"{name}.out").open("w") as out, (self.folder / f"{name}.log").open("w") as log:
            child = subprocess.Popen([sys.executable, *command], stdout=out, stderr=log, env=os.environ | own)
            try:
                return child.wait(max(1.0, seconds))
            except subprocess.TimeoutExpired:
                child.terminate()
                try:
                    child.wait(5)
                except subprocess.TimeoutExpired:
                    child.kill()
                return None

    def fuzz(self, name: str, gpu: int | None, workers: int, seconds: float, *options: str) -> None:
        """Fuzz, and say how many graphs were run and what was found."""
        bounds = ("--examples", "1000000", "--time", f"{int(seconds)}s", "--workers", str(workers))
        places = ("--database", str(self.folder / "cache" / f"{name}.db"), "--findings", str(self.folder / name))
        seed = self.seed + zlib.crc32(name.encode()) % 1000
        command = ("-m", "fusec", "fuzz", "--json", *bounds, *places, "--seed", str(seed), *options)
        self.run(name, gpu, command, seconds + GRACE_S)
        try:
            data: dict[str, Any] = json.loads((self.folder / f"{name}.out").read_text())
        except ValueError:
            self.say(f"{name}: no report, see {name}.log", failed=True)
            return
        found = [*data["findings"], *data["doubts"]]
        self.say(f"{name}: {data['examples']} graphs, {len(found)} findings and doubts", failed=bool(found))
        for one in found:
            self.say(f"    {one['message'][:160]}")


def fuzz(machine: Machine, seconds: float) -> None:
    """Compare steps and programs on the GPUs with their meaning; two processes of each GPU check kernels alone."""
    per_gpu = [(gpu, kind) for gpu in range(machine.gpus) for kind in ("device", "kernels")]

    def one(gpu: int, kind: str) -> None:
        options = ("--property", "device_agrees") if kind == "device" else KERNELS
        workers = max(1, machine.share - 2) if kind == "device" else 2
        machine.fuzz(f"{kind}{gpu}", gpu, workers, seconds - GRACE_S, "--device", *options)

    together([lambda gpu=gpu, kind=kind: one(gpu, kind) for gpu, kind in per_gpu])


def cpu(machine: Machine, seconds: float) -> None:
    """Check the properties that need no GPU, on all cores."""
    machine.fuzz("cpu", None, machine.cores, seconds - GRACE_S)


def suite(machine: Machine, seconds: float) -> None:
    """Run onnx's suite on the last GPU."""
    options = ("--device", "cuda", "--workers", str(max(1, machine.share // 2)), "--commit", machine.commit)
    command = ("-m", "benchmarks.checks.onnx_suite", *options, "--output", str(machine.folder / "onnx_suite.json"))
    status = machine.run("suite", machine.gpus - 1, command, seconds)
    machine.say(f"suite: {last_line(machine.folder / 'suite.out')}", failed=status != 0)


def tests(machine: Machine, seconds: float) -> None:
    """Run the tests that need a GPU, a share of them on each GPU."""

    def one(gpu: int) -> None:
        plugins = ("-p", "benchmarks.checks.gpu_evidence", "-p", "no:benchmark", "-p", "no:cacheprovider")
        options = ("-m", "gpu", "-v", "-n", str(max(1, machine.share - 2)), "--dist", "worksteal", "--durations", "10")
        command = ("-m", "pytest", *plugins, *options, *(f"tests/{name}" for name in FOLDERS))
        status = machine.run(f"tests{gpu}", gpu, command, seconds, **{SHARD: f"{gpu}/{machine.gpus}"})
        text = (machine.folder / f"tests{gpu}.out").read_text()
        passed, failed = text.count(" PASSED "), sorted(set(re.findall(r"FAILED (tests/\S+)", text)))
        cut = ", stopped before the end" if status is None else ""
        machine.say(f"tests{gpu}: {passed} passed, {len(failed)} failed{cut}", failed=status != 0 or not passed)
        for name in failed:
            machine.say(f"    {name}")

    together([lambda gpu=gpu: one(gpu) for gpu in range(machine.gpus)])


def times(machine: Machine, seconds: float) -> None:
    """Time the models of the comparison with peers, without the peers; each GPU takes the next model."""
    from benchmarks.models.peers import CASES  # here, because it needs torch

    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for case in CASES:
        left.put(case)
    end = time.monotonic() + seconds

    def worker(gpu: int) -> None:
        while time.monotonic() < end - GRACE_S:
            try:
                case = left.get_nowait()
            except queue.Empty:
                return
            name = f"times-{case.replace(':', '-b')}"
            (machine.folder / name).mkdir(exist_ok=True)
            output = ("--output", str(machine.folder / name / "peers.json"), "--commit", machine.commit)
            command = ("-m", "benchmarks.models.peers", "--peers", "", *output, case)
            status = machine.run(name, gpu, command, end - time.monotonic())
            machine.say(f"{name}: {last_line(machine.folder / f'{name}.out')[:120]}", failed=status != 0)

    together([lambda gpu=gpu: worker(gpu) for gpu in range(machine.gpus)])
    while not left.empty():
        machine.say(f"times: {left.get_nowait()} was not reached", failed=True)


PHASES: dict[str, Callable[[Machine, float], None]] = {
    "fuzz": fuzz,
    "suite": suite,
    "tests": tests,
    "times": times,
    "cpu": cpu,
}


def together(calls: Sequence[Callable[[], None]]) -> None:
    """Call functions in threads, and wait for all."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def last_line(path: Path) -> str:
    lines = path.read_text().strip().splitlines()
    return lines[-1] if lines else "no output"


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave this process its share of the tests: `python -m pytest -p benchmarks.checks.gpu_evidence`."""
    number, count = map(int, os.environ.get(SHARD, "0/1").split("/"))
    share: dict[bool, list[Any]] = {True: [], False: []}
    for item in items:
        share[zlib.crc32(item.nodeid.encode()) % count == number].append(item)
    config.hook.pytest_deselected(items=share[False])
    items[:] = share[True]


def phases(texts: Sequence[str]) -> list[tuple[list[str], float]]:
    """Read `suite,tests:200` as names and seconds. Raises ValueError for another form, or an unknown name."""
    read: list[tuple[list[str], float]] = []
    for text in texts:
        names, _, seconds = text.partition(":")
        if unknown := [name for name in names.split(",") if name not in PHASES]:
            raise ValueError(f"{unknown[0]!r} is no phase: {', '.join(PHASES)}")
        read.append((names.split(","), float(seconds)))
    return read


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("phases", nargs="+", metavar="PHASE:SECONDS")
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--commit", default="", help="the measured commit; git is asked if it is not given")
    given = options.parse_args()
    from fusec.gpu.device import visible_gpus  # here, because pytest loads this module as a plugin

    given.folder.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    machine = Machine(given.folder.resolve(), max(1, len(visible_gpus())), cores, given.seed, given.commit)
    machine.say(f"{machine.gpus} GPUs, {cores} cores, seed {given.seed}")
    for names, seconds in phases(given.phases):
        started = time.monotonic()
        together([lambda name=name, seconds=seconds: PHASES[name](machine, seconds) for name in names])
        machine.say(f"{','.join(names)}: {time.monotonic() - started:.0f} s")
    (machine.folder / "summary.txt").write_text("\n".join(machine.lines) + "\n")
    shutil.rmtree(machine.folder / "cache", ignore_errors=True)
    return machine.failed


if __name__ == "__main__":
    sys.exit(main())
