"""Test the property of fusec's kernels: their CUDA code runs on the CPU, then on a GPU."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
from gpu.kernels.emulator import functions, needs_compiler
from helpers import HEALTH_CHECKS
from hypothesis import Phase, given, seed, settings

from fusec.errors import ExecutionError, TargetError
from fusec.gpu.kernels import FAMILIES, Kernel
from fusec.gpu.kernels.codegen.kernel import prelude
from fusec.ir import DType, Graph
from fusec.testing import register
from fusec.testing.case import Case, MismatchError
from fusec.testing.generators.graph_builder import RandomGraph, Unfit
from fusec.testing.generators.motifs.kernels import KERNELS, MOST_ELEMENTS
from fusec.testing.properties import kernels_on_device, on_device
from fusec.testing.properties.fixtures import prepared
from fusec.testing.properties.kernels_on_device import jobs, kernels_agree
from fusec.testing.properties.table import PROPERTIES
from fusec.testing.runner.coverage import Coverage
from fusec.testing.strategies import KERNEL_FLOATS, cases, kernel_graphs
from fusec.text import parse

NAMES = {family.__name__ for family in FAMILIES}
GRAPH = parse("""graph "g" (%x: f32[5,33]) {
  %s = softmax(%x) {axis=-1}
  %y = relu(%s)
  return %y
}""")
UPDATE = parse("""graph "g" (%p: f32[5], %q: f32[7], %g: f32[5], %h: f32[7], %rate: f32[]) {
  %a = mul(%g, %rate)
  %b = sub(%p, %a)
  %c = mul(%h, %rate)
  %d = sub(%q, %c)
  return %b, %d
}""")

SCATTER = """graph "g" (%x: f32[600,2], %u: f32[300,2]) {{
  %i = constant {indices} : i64[300]
  %y = scatter(%x, %i, %u) {{reduction="{reduction}"}}
  return %y
}}"""


class Emulated:
    """Run the kernels' CUDA code on the CPU, with a chosen fault."""

    xp: Any = np

    def __init__(self, fault: str = ""):
        self.fault = fault
        self.ran: list[str] = []

    def runs(self, kernel: Kernel) -> bool:
        return self.fault != "no room"

    def run(self, kernel: Kernel, buffers: Mapping[Any, np.ndarray]) -> None:
        if self.fault == "illegal":
            raise ExecutionError("an illegal memory access was encountered")
        self.ran.append(kernel.name)
        calls = functions(prelude() + "".join({launch.entry: launch.source for launch in kernel.launches}.values()))
        held: dict[Any, np.ndarray] = {key: _aligned(buffer) for key, buffer in buffers.items()}
        scratch = _aligned(np.full(kernel.scratch_bytes + 1, 0xA5, np.uint8))
        for launch in kernel.launches if self.fault != "stale" else ():
            pointers: list[int] = []
            for argument in launch.arguments:
                key = (argument.value, argument.type)
                if argument.value is None and argument.type is not None:  # barrier counters, which are zero at first
                    held.setdefault(key, _aligned(np.zeros(argument.type.size, np.uint32)))
                pointers.append((scratch if argument.type is None else held[key]).ctypes.data)
            calls[launch.entry](launch, [*pointers, *(value for _, value in launch.numbers)])
        for (value, type), buffer in buffers.items():
            buffer.view(np.uint8)[...] = held[value, type]
            if value in kernel.written and self.fault == "other order":
                buffer[0] *= 1 + len(self.ran) * 2**-23
            if value in kernel.written and self.fault == "wrong":
                buffer[0] += 1
            if value in kernel.written and self.fault == "too far":
                buffer[type.span] = 0
            if value not in kernel.written and self.fault == "input":
                buffer[0] += 1


def _aligned(buffer: np.ndarray) -> np.ndarray:
    """Return the bytes at the places of the memory plan."""
    raw = np.zeros(buffer.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    copy = raw[start : start + buffer.nbytes]
    copy[...] = buffer.view(np.uint8)
    return copy


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Emulated], Emulated]:
    def use(launches: Emulated) -> Emulated:
        monkeypatch.setattr(on_device.device, "is_present", lambda target: True)
        monkeypatch.setattr(kernels_on_device, "_launches", lambda: launches)
        return launches

    return use


def drawn(count: int) -> list[tuple[Graph, Case]]:
    """Draw graphs as the fuzzer does, the same ones each time."""
    found: list[tuple[Graph, Case]] = []
    phases, checks = [Phase.generate], HEALTH_CHECKS

    @seed(5)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=checks,
        backend=register(),
    )
    @given(kernel_graphs(), cases())
    def collect(graph: Graph, case: Case) -> None:
        found.append((graph, case))

    collect()
    return found


def test_every_family_has_a_motif() -> None:
    assert set(KERNELS) == NAMES


class SeededGraph(RandomGraph):
    """A random graph whose choices depend on its seed alone, and not on what ran before in this process."""

    def __init__(self, seed: int, dtype: DType):
        self._rng = random.Random(seed)
        drawn_by_none: Any = None  # because `below` makes every choice
        super().__init__(drawn_by_none, dtype)
        self.most_elements = MOST_ELEMENTS

    def below(self, count: int) -> int:
        return self._rng.randrange(count) if count > 1 else 0

    def nested(self) -> RandomGraph:
        inner = SeededGraph(self.below(1 << 16), self.dtype)
        inner.graph, inner.is_nested = Graph("body"), True
        return inner


def families(name: str, seed: int) -> Counter[str]:
    """Count the families of kernels in a graph of one motif."""
    builder = SeededGraph(seed, KERNEL_FLOATS[seed % len(KERNEL_FLOATS)])
    try:
        KERNELS[name](builder)
    except Unfit:
        return Counter()
    graph = builder.finish()
    graph.verify()
    return Counter(job.family for job in jobs(prepared(graph, Case(seed)).compiled))


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_family_occurs(name: str) -> None:
    with_kernel = (seed for seed in range(SEEDS) if families(name, seed)[name])
    assert len(list(islice(with_kernel, 2))) == 2, f"of {SEEDS} graphs of its motif, at most one has a kernel of {name}"


SEEDS = 32  # an instance norm has a kernel of its own in one of eight graphs, the others in most


@needs_compiler
def test_property_holds_for_correct_kernels(gpu: Any) -> None:
    launches = gpu(Emulated())
    for style in ("normal", "special", "integers"):
        kernels_agree(GRAPH, Case(style=style))
    assert launches.ran
    for graph, case in drawn(COUNT):
        kernels_agree(graph, case)


COUNT = 12


@needs_compiler
def test_updates_of_state_run_as_multi_tensor_kernels(gpu: Any) -> None:
    launches = gpu(Emulated())
    kernels_agree(UPDATE)
    assert "lists of mul+sub" in launches.ran


@needs_compiler
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong", r"row_reduction: the kernel for .*: .* differs in"),
        ("stale", "depends on what its memory held before"),
        ("too far", "writes memory that is not of"),
        ("input", "an input, was written"),
    ],
)
def test_wrong_kernel_is_found(gpu: Any, fault: str, message: str) -> None:
    gpu(Emulated(fault))
    with pytest.raises(MismatchError, match=message):
        kernels_agree(GRAPH)


def scatter(reduction: str, indices: list[int]) -> Graph:
    return parse(SCATTER.format(reduction=reduction, indices=indices))


@needs_compiler
def test_sums_in_any_order_need_not_have_the_same_bits(gpu: Any) -> None:
    same = [7] * 300
    launches = gpu(Emulated("other order"))
    kernels_agree(scatter("add", same))
    assert launches.ran == ["scatter", "scatter"]
    with pytest.raises(MismatchError, match="depends on what its memory held"):
        kernels_agree(scatter("max", same))
    for fault in ("wrong", "stale"):
        gpu(Emulated(fault))
        with pytest.raises(MismatchError, match="differs in"):
            kernels_agree(scatter("add", same))


@needs_compiler
def test_rows_that_are_replaced_twice_have_no_right_result(gpu: Any) -> None:
    launches = gpu(Emulated())
    with pytest.raises(SkipTest, match="any of them may stay"):
        kernels_agree(scatter("none", [5, -595, *range(6, 304)]))
    assert not launches.ran
    kernels_agree(scatter("none", [5, -594, *range(7, 305)]))
    assert launches.ran


def test_kernel_that_does_not_fit_the_gpu_is_skipped(gpu: Any) -> None:
    launches = gpu(Emulated("no room"))
    kernels_agree(GRAPH)
    assert not launches.ran


def test_lost_cuda_context_ends_the_process(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> None:
        raise SystemExit(status)

    gpu(Emulated("illegal"))
    monkeypatch.setattr(on_device.os, "_exit", leave)
    with pytest.raises(ExecutionError, match="illegal"):
        kernels_agree(GRAPH)
    monkeypatch.setattr(on_device, "_alive", lambda backend: False)
    with pytest.raises(SystemExit, match=str(on_device.FAULTED)):
        kernels_agree(GRAPH)


def test_error_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device.device, "is_present", lambda target: False)
    with pytest.raises(TargetError, match="no GPU that is a h200"):
        kernels_agree(GRAPH)
    assert PROPERTIES["kernels_agree"].needs == "gpu"


@needs_compiler
def test_families_that_ran_are_counted(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.testing.runner import instrument

    gpu(Emulated())
    counters = Coverage()
    monkeypatch.setattr(kernels_on_device, "kernel_agrees", kernels_on_device.kernel_agrees)  # put back afterwards
    instrument.count_kernels(lambda: counters)
    kernels_agree(GRAPH)
    assert counters.sections["kernels"]["row_reduction"] >= 1


@pytest.mark.gpu
def test_fuzzing_on_this_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fusec", "fuzz", "--device", "--property", "kernels_agree", "--examples", "40"]
    options = ["--graphs", "fusec.testing.strategies:kernel_graphs", "--workers", "4", "--json"]
    folders = ["--database", str(tmp_path / "db"), "--findings", str(tmp_path / "findings")]
    done = subprocess.run([*command, *options, *folders], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(json.loads(done.stdout)["coverage"]["kernels"]) > len(FAMILIES) // 2
