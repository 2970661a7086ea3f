"""Measure the times of an executable: of a call, of all steps together, and of each step against its limit.

The limit of a step is the larger of its bytes over the target's bandwidth and its operations over the target's peak
(S. Williams et al., Roofline, CACM 52(4), 2009).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fusec.diagnostics.text_table import bytes_text
from fusec.execution.simulator_backend import SimulatorBackend
from fusec.gpu.autotune.step_choices import TunedChoices
from fusec.passes.partition.cost_model import limit_us
from fusec.schedule.program import Kind, counts
from fusec.system.dataclass import dataclass
from fusec.targets.target import CPU

if TYPE_CHECKING:
    from fusec.runtime import Executable

EXCESS = 1.25  # ratio of the whole to the sum of its steps from which the report mentions it
RUNS = 20
WITHOUT_GPU = (SimulatorBackend.name, CPU)  # devices on which NumPy runs the steps


@dataclass(frozen=True)
class Timing:
    """Median and deciles of some runs, in microseconds."""

    median_us: float
    low_us: float
    high_us: float
    runs: int

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Timing:
        """Summarise some runs."""
        ordered = sorted(times_us)
        tenth = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))


@dataclass(frozen=True)
class StepTime:
    """One step that runs on the device, so no view.

    kind: cudnn, cublaslt, kernel, or reference (op by op through CuPy or NumPy).
    limit_us: least time that its bytes or operations need.
    """

    index: int
    signature: str
    kind: str
    time: Timing
    limit_us: float


@dataclass(frozen=True)
class Bench:
    """Measured times of an executable. Without a GPU they are of NumPy, and no text compares them with a GPU's.

    call: a call, from the caller's arrays to results, by the host's clock.
    more: time of a call minus that of a replay of its steps, measured alternately.
    whole: all steps on the device, as a call runs them.
    first_call_s: the first call, which runs step by step and captures a CUDA graph.
    lanes: largest number of steps that run at the same time.
    other_us, this_us: the whole in the other order and in this one, timed alternately; None if not timed.
    declined: reason why the other order could not be captured.
    views: number of steps that do no work, which `steps` leaves out.
    partitioned: the number of steps before tuning, in words; empty if the program was not tuned.
    """

    device: str
    first_call_s: float
    call: Timing
    more: Timing
    whole: Timing
    steps: tuple[StepTime, ...]
    memory_bytes: int
    live_bytes: int
    lanes: int = 1
    other_us: float | None = None
    declined: str = ""
    this_us: float | None = None
    views: int = 0
    partitioned: str = ""

    @property
    def counts(self) -> str:
        """Return the number of steps in words, as every report counts them."""
        return counts(len(self.steps) + self.views, len(self.steps))

    @property
    def totals(self) -> dict[str, int]:
        """Return the numbers of steps, launches and views."""
        return {"steps": len(self.steps) + self.views, "launches": len(self.steps), "views": self.views}

    @property
    def is_simulated(self) -> bool:
        """Tell if NumPy ran the steps, so that no time is of a GPU."""
        return self.device in WITHOUT_GPU

    @property
    def sum_us(self) -> float:
        """Return the sum of the steps, each timed alone."""
        return sum(step.time.median_us for step in self.steps)

    @property
    def limit_us(self) -> float:
        """Return the sum of the limits of the steps."""
        return sum(step.limit_us for step in self.steps)

    @property
    def excess(self) -> float | None:
        """Return the ratio of the whole to the sum of its steps; None in simulation, or if it is not above EXCESS."""
        if self.is_simulated:
            return None
        ratio = self.whole.median_us / self.sum_us if self.sum_us else 1.0
        return ratio if ratio > EXCESS else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data. `more` is None in simulation, where NumPy's times vary by more than a call costs."""
        sums = {"sum_us": self.sum_us, "limit_us": self.limit_us, "excess": self.excess, "totals": self.totals}
        data = {**asdict(self), **sums, "simulated": self.is_simulated}
        return {**data, "more": None} if self.is_simulated else data

    def trace(self) -> dict[str, Any]:
        """Return the steps as a trace: one after the other, each with its time alone.

        Perfetto and chrome://tracing open it (Trace Event Format, complete events).
        """
        process = "simulated by NumPy, no times of a GPU" if self.is_simulated else self.device
        events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": process}}]
        start = 0.0
        for step in self.steps:
            arguments = {"step": step.index, "limit_us": step.limit_us}
            event = {"name": step.signature, "cat": step.kind, "ph": "X", "pid": 0, "tid": 0, "args": arguments}
            events.append({**event, "ts": start, "dur": step.time.median_us})
            start += step.time.median_us
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def table(self) -> str:
        """Return a table of the steps, slowest first; in simulation of their limits, the largest first."""
        if self.is_simulated:
            return self._limits_table()
        rows = sorted(self.steps, key=lambda step: -step.time.median_us)
        named = {step: f"{step.kind} {step.signature}" for step in rows}
        width = max([len(name) for name in named.values()] + [4])
        lines = [f"step {'':{width}}  {'us':>9} {'limit us':>9} {'share':>6}"]
        for step in rows:
            share = step.time.median_us / self.sum_us if self.sum_us else 0.0
            lines.append(
                f"{step.index:4} {named[step]:{width}}  {step.time.median_us:9.1f} {step.limit_us:9.1f} {share:6.1%}"
            )
        return "\n".join(lines)

    def _limits_table(self) -> str:
        rows = sorted(self.steps, key=lambda step: -step.limit_us)
        named = {step: f"{step.kind} {step.signature}" for step in rows}
        width = max([len(name) for name in named.values()] + [4])
        lines = [f"step {'':{width}}  {'limit us':>9} {'share':>6}"]
        for step in rows:
            share = step.limit_us / self.limit_us if self.limit_us else 0.0
            lines.append(f"{step.index:4} {named[step]:{width}}  {step.limit_us:9.1f} {share:6.1%}")
        return "\n".join(lines)

    @property
    def _memory_text(self) -> str:
        live = bytes_text(self.live_bytes)
        return f"memory {bytes_text(self.memory_bytes)}, of which {live} at the same time"

    def _simulated_text(self) -> str:
        return (
            f"simulated by NumPy, so no time of a GPU was measured; a simulated call takes "
            f"{self.call.median_us / 1e6:.3g} s\n"
            f"{self.counts}, limit {self.limit_us:.1f} us on the target; {self._memory_text}"
        )

    def __str__(self) -> str:
        if self.is_simulated:
            return self._simulated_text()
        lines = [
            f"on {self.device}: {_shown(self.call)} a call, {self.more.median_us:.1f} us more than a replay of its "
            f"steps; {_shown(self.whole)} all steps together",
            f"{self.counts}, {self.sum_us:.1f} us in sum if timed alone, limit {self.limit_us:.1f} us; "
            f"first call {self.first_call_s:.3f} s; {self._memory_text}",
        ]
        if self.partitioned not in ("", self.counts):
            lines.append(f"these are the steps as tuned; before tuning there were {self.partitioned}")
        if self.other_us is not None:
            orders = ("in order", f"in parallel on {self.lanes} streams" if self.lanes > 1 else "in parallel")
            this, other = reversed(orders) if self.lanes > 1 else orders
            took = f" in {self.this_us:.1f} us" if self.this_us is not None else ""
            lines.append(f"steps run {this}{took}; {other} they took {self.other_us:.1f} us")
        if self.declined:
            lines.append(f"as captured: {self.declined}")
        if self.excess is not None:
            lines.append(
                f"all steps together take {self.excess:.2f} times the sum of the steps alone: a step is slower "
                "next to the others"
            )
        return "\n".join(lines)


def measure(executable: Executable, feeds: Mapping[str, Any], runs: int | None = None) -> Bench:
    """Time calls with these inputs, all steps in one replay, and each step alone.

    runs: number of times that everything is timed; None: `RUNS`, and once in simulation, where a call takes seconds.
    """
    runs = runs or (1 if executable.device in WITHOUT_GPU else RUNS)
    start = time.perf_counter()
    executable.run(None, feeds)
    first_call_s = time.perf_counter() - start
    executable.run(None, feeds)  # the first call that replays
    calls: list[float] = []
    replays: list[float] = []
    for _ in range(runs):
        for run, series in ((lambda: executable.run(None, feeds), calls), (executable.replay, replays)):
            start = time.perf_counter()
            run()
            executable.backend.finish()
            series.append(1e6 * (time.perf_counter() - start))
    whole, times = executable.time_us(runs)
    compiled, libraries = executable.compiled, executable.libraries()
    steps = [
        StepTime(
            index,
            step.signature,
            "reference"
            if step.kind is Kind.KERNEL and step not in executable.kernels
            else libraries.get(step, step.kind.value),
            Timing.of(times[index]),
            limit_us(step.nodes, compiled.target),
        )
        for index, step in enumerate(compiled.program.steps)
        if step.kind is not Kind.VIEW
    ]
    memory = executable.memory
    return Bench(
        executable.device,
        first_call_s,
        Timing.of(calls),
        Timing.of([call - replay for call, replay in zip(calls, replays, strict=True)]),
        Timing.of(whole),
        tuple(steps),
        memory.nbytes,
        memory.live_bytes,
        *executable.recorded,
        views=len(compiled.program.steps) - compiled.program.launches,
        partitioned=tuned.partitioned.counts if isinstance(tuned := compiled.tuned, TunedChoices) else "",
    )


def _shown(timing: Timing) -> str:
    return f"{timing.median_us:.1f} us ({timing.low_us:.1f} to {timing.high_us:.1f})"
