"""Test that kernels are shaped for the target: each launch fits its shared memory, clusters and instructions."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, assert_same, each_way
from gpu.kernels.emulator import Emulator, needs_compiler
from gpu.kernels.test_compile import cases_of_one_form, nvrtc, shaped_cases
from helpers import quick

from benchmarks.kernels.kernel_cases import CASES
from benchmarks.kernels.kernel_times import kernel_of
from fusec.gpu.kernels import GpuFigures, Kernel
from fusec.gpu.kernels.codegen.kernel import CLUSTERS, Launch, prelude
from fusec.targets.target import DEFAULT, load, names

SIZES = {"bool": 1, "i8": 1, "u8": 1, "f16": 2, "bf16": 2, "i16": 2, "u16": 2, "float": 4, "double": 8} | {
    "i32": 4,
    "u32": 4,
    "i64": 8,
    "u64": 8,
}
DECLARATION = re.compile(r"^\s*(?:alignas\(16\) )?__shared__ (?:Pack<(\w+), (\d+)>|(\w+)) (.*);", re.MULTILINE)
PRELUDE_BYTES = 4  # of its functions: one number
CLUSTER_BLOCKS, BLOCK_THREADS = 8, 1024  # that every GPU with clusters, and every GPU, can start (CUDA C++ guide)
ALIGNMENT, SYSTEM_BYTES = 16, 1024  # more that a compiler counts; for sm_90 and later also the driver's own


@cache
def all_cases() -> list[Case]:
    """All cases that figures shape, and some of the others."""
    return [*cases_of_one_form()[::16], *shaped_cases()]


@cache
def of_cases(target: str) -> list[Kernel | None]:
    """The kernel of each case on a target, written once for all tests."""
    figures = GpuFigures.of(load(target))
    return [replace(case, figures=figures).kernel for case in all_cases()]


@cache
def kernels(target: str) -> list[Kernel]:
    """All kernels and variants on a target: of the cases, and of those that are timed, whose sizes are of models."""
    found = [*of_cases(target), *(kernel_of(*CASES[name], load(target))[0] for name in CASES)]
    return [each for kernel in found if kernel is not None for each in (kernel, *kernel.others)]


def launches(target: str) -> Iterator[Launch]:
    for kernel in kernels(target):
        yield from kernel.launches


def static_bytes(source: str) -> int:
    """The shared memory that a source declares."""
    found = 0
    for packed, count, plain, declared in DECLARATION.findall(source):
        size = SIZES[packed or plain] * int(count or 1)
        for name in declared.split(", "):
            found += size * prod(prod(map(int, re.findall(r"\d+", dim))) for dim in re.findall(r"\[([^]]*)\]", name))
    return found


def misfit(launch: Launch, figures: GpuFigures) -> str:
    """Return the reason why a GPU cannot launch it; empty if it can."""
    static = static_bytes(launch.source) + PRELUDE_BYTES * ("last_of(" in launch.source)
    if static > figures.static_bytes:
        return f"{launch.entry}: {static} bytes of static shared memory"
    if static + launch.resident_bytes > figures.shared_bytes:
        return f"{launch.entry}: {static} + {launch.resident_bytes} bytes of shared memory"
    if launch.cluster > 1 and not figures.has(CLUSTERS):
        return f"{launch.entry}: clusters of {launch.cluster}"
    if launch.cluster > CLUSTER_BLOCKS or launch.grid % max(launch.cluster, 1):
        return f"{launch.entry}: {launch.grid} blocks in clusters of {launch.cluster}, of at most {CLUSTER_BLOCKS}"
    if not 0 < launch.block <= BLOCK_THREADS:
        return f"{launch.entry}: blocks of {launch.block} threads"
    if not figures.has(launch.architecture):
        return f"{launch.entry}: instructions of {launch.architecture}"
    if "wgmma" in launch.source and launch.architecture != "sm_90a":
        return f"{launch.entry}: products of four warps, compiled for any GPU"
    if launch.cooperative and launch.grid > figures.processors * (figures.processor_threads // launch.block):
        return f"{launch.entry}: {launch.grid} blocks of {launch.block} threads that wait for each other"
    return ""


@pytest.mark.parametrize("target", quick(names(), ["t4", "h200"]))
def test_every_launch_fits_the_target(target: str) -> None:
    figures = GpuFigures.of(load(target))
    assert [why for launch in launches(target) if (why := misfit(launch, figures))] == []


@pytest.mark.parametrize("processors", [16, 144, 300])
def test_every_launch_fits_an_h200_with_other_multiprocessors(processors: int) -> None:
    figures = replace(FIGURES, processors=processors)
    found = [replace(case, figures=figures).kernel for case in all_cases()]
    assert all(kernel is not None for case, kernel in zip(all_cases(), found, strict=True) if case.kernel is not None)
    ways = [way for kernel in found if kernel is not None for way in (kernel, *kernel.others)]
    assert [why for way in ways for launch in way.launches if (why := misfit(launch, figures))] == []


def test_what_is_shaped_for_another_gpu_does_not_fit() -> None:
    """Else the test above would see nothing."""
    small = GpuFigures.of(load("t4"))
    whys = " ".join(misfit(launch, small) for launch in launches("h200"))
    for why in ("of shared memory", "clusters of", "instructions of sm_90a", "that wait for each other"):
        assert why in whys


def test_blocks_and_clusters_that_no_gpu_starts_are_found() -> None:
    launch = next(launch for launch in launches("h200") if launch.cluster > 1 and not misfit(launch, FIGURES))
    wide = replace(launch, cluster=16, grid=16 * launch.grid)
    odd, tall = replace(launch, grid=launch.grid + 1), replace(launch, block=2048)
    assert "in clusters of 16" in misfit(wide, FIGURES) and "in clusters of" in misfit(odd, FIGURES)
    assert "blocks of 2048 threads" in misfit(tall, FIGURES)


def of_hopper(kernel: Kernel) -> bool:
    """Tell if all variants of a kernel have launches for Hopper alone."""
    return all(any(launch.architecture in ("sm_90", "sm_90a") for launch in way.launches) for way in each_way(kernel))


@pytest.mark.parametrize("target", names())
def test_a_smaller_gpu_keeps_its_kernels(target: str) -> None:
    """A T4 lacks room for keys of 64 features, and copies for gated products. On an A100 arithmetic bounds one.

    Gradients of attention need products that only Hopper has.
    """
    both = zip(all_cases(), of_cases(DEFAULT), of_cases(target), strict=True)
    lost = [case for case, here, there in both if here is not None and there is None and not of_hopper(here)]
    allowed = {"t4": ("attention", "gated"), "a100": ("(11, 1152, 7, 7) 192",)}.get(target, ())
    assert all(any(word in f"{case.name} {case.nodes}" for word in allowed) for case in lost)


@needs_compiler
@pytest.mark.parametrize("target", ["t4", "l4"])
def test_what_is_shaped_for_another_gpu_computes_the_same(rng: np.random.Generator, target: str) -> None:
    """Of each kind, what has other launches than on the default target."""
    sample = dict[str, tuple[Case, Kernel]]()
    for case, here, there in zip(all_cases(), of_cases(DEFAULT), of_cases(target), strict=True):
        known = {way.key for way in each_way(here)} if here is not None else set[str]()
        for way in each_way(there) if there is not None else ():
            if way.key not in known:
                sample.setdefault(way.launches[0].entry.rpartition("_")[0], (case, way))
    assert len(sample) > 4
    emulator = Emulator([way for _, way in sample.values()])
    for case, way in sample.values():
        arrays = case.arrays(rng)
        got = emulator.run(way, arrays, case.outputs)
        assert_same(case, got, case.reference(arrays), case.magnitudes(arrays))


def test_targets_differ_where_their_figures_do() -> None:
    """One processor more or less is another grid; equal figures are equal kernels."""
    assert [k.key for k in kernels("h100")] != [k.key for k in kernels("b200")] != [k.key for k in kernels("a100")]
    again = GpuFigures.of(load("h200"))
    assert again == FIGURES and hash(again) == hash(FIGURES), "it is part of a key"


def shared_of_sections(cubin: bytes) -> dict[str, int]:
    """By entry, the static shared memory that the compiler reserved, from the headers of the ELF file."""
    offset, size, count, names_at = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<II4Q", cubin, offset + number * size) for number in range(count)]
    texts = headers[names_at][4]
    found: dict[str, int] = {}
    for name_at, _, _, _, _, nbytes in headers:
        name = cubin[texts + name_at : cubin.index(b"\0", texts + name_at)].decode()
        if name.startswith(".nv.shared.") and "reserved" not in name:
            found[name.removeprefix(".nv.shared.")] = nbytes
    return found


@pytest.mark.cudnn
@pytest.mark.parametrize("target", names())
def test_a_sample_compiles_for_the_target(target: str) -> None:
    """One source of each kind that figures shape; the compiler reserves at most what was counted."""
    compiler, sm = nvrtc(), load(target).sm
    sample: dict[tuple[str, str], Launch] = {}
    for launch in launches(target):
        if launch.resident_bytes or launch.cooperative or launch.cluster > 1:
            name = launch.entry.rpartition("_")[0], launch.architecture
            sample[name] = max(launch, sample.get(name, launch), key=lambda each: each.resident_bytes)
    assert len(sample) > 8
    fast = ["--Ofast-compile=max"] if compiler.getVersion() >= (12, 9) else []
    for own in (True, False):
        some = [each for each in sample.values() if each.architecture.endswith("a") is own]
        if not some:
            continue
        program = compiler.createProgram(prelude() + "".join(each.source for each in some), "kernels.cu", (), ())
        options = ("--std=c++17", f"--gpu-architecture=sm_{sm}{'a' * own}", *fast)
        try:
            compiler.compileProgram(program, options)
        except compiler.NVRTCError:
            pytest.fail(compiler.getProgramLog(program)[:4000])
        reserved = shared_of_sections(compiler.getCUBIN(program))
        for each in some:
            most = static_bytes(each.source) + PRELUDE_BYTES + ALIGNMENT + SYSTEM_BYTES
            assert reserved.get(each.entry, 0) <= most, each.entry
