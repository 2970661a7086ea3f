"""Every kernel's source compiles for every GPU fusec knows, without a GPU; and, on one, computes what it should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import Case, assert_same, each_way, on_the_device
from gpu.kernels.test_attention_kernels import attention_cases
from gpu.kernels.test_channel_kernels import channel_cases, surrounded_channels
from gpu.kernels.test_depthwise_kernels import random_cases as depthwise_cases
from gpu.kernels.test_few_channels import random_cases as few_channels_cases
from gpu.kernels.test_few_filters import random_cases as few_filters_cases
from gpu.kernels.test_few_filters import wide_cases
from gpu.kernels.test_few_pixels import few_cases as few_pixels_cases
from gpu.kernels.test_gate_kernels import gate_cases
from gpu.kernels.test_group_norm_kernels import cases as group_norm_cases
from gpu.kernels.test_instance_kernels import cases as instance_cases
from gpu.kernels.test_integer_products import integer_cases
from gpu.kernels.test_list_kernels import list_cases
from gpu.kernels.test_move_kernels import among_pointwise_ops, move_cases
from gpu.kernels.test_pointwise_kernels import cast_cases, op_cases, shape_cases
from gpu.kernels.test_pooling_kernels import random_backward_cases, random_cases
from gpu.kernels.test_rotary_kernels import cases as rotary_cases
from gpu.kernels.test_row_backward_kernels import norm_backward_cases, surrounded_norm_backward
from gpu.kernels.test_row_kernels import normed, reductions, surrounded
from gpu.kernels.test_sampled_kernels import among_pointwise_ops as around_samples
from gpu.kernels.test_sampled_kernels import gather_cases, pad_cases, resize_cases
from gpu.kernels.test_thin_products import thin_cases

from benchmarks.kernels import CASES, kernel_of
from fusec.gpu.kernels.spec import prelude
from fusec.target import load, names

ARCHITECTURES = sorted({load(name).sm for name in names()} | {120})


def cases() -> list[Case]:
    return [
        *op_cases(),
        *shape_cases(),
        *cast_cases(),
        *random_cases(),
        *random_backward_cases(),
        *reductions(),
        *normed(),
        *surrounded(),
        *attention_cases(),
        *channel_cases(),
        *surrounded_channels(),
        *norm_backward_cases(),
        *surrounded_norm_backward(),
        *depthwise_cases(),
        *gate_cases(),
        *thin_cases(),
        *few_channels_cases(),
        *few_filters_cases(),
        *wide_cases(),
        *few_pixels_cases(),
        *instance_cases(),
        *group_norm_cases(),
        *move_cases(),
        *among_pointwise_ops(),
        *resize_cases(),
        *pad_cases(),
        *gather_cases(),
        *around_samples(),
        *rotary_cases(),
        *list_cases(),
        *integer_cases(),
    ]


PARTS = 12  # for as many processes


def nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no NVRTC: {error}")
    return nvrtc


@pytest.mark.cudnn
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sources_compile(architecture: int) -> None:
    compiler = nvrtc()
    kernels = [case.kernel for case in cases()]
    ways = [way for kernel in kernels if kernel is not None for way in (kernel, *kernel.others)]
    launches = [launch for way in ways for launch in way.launches]
    own = [launch for launch in launches if launch.architecture.rstrip("a") == f"sm_{architecture}"]
    everywhere = [launch for launch in launches if not launch.architecture.endswith("a")]
    later = {launch.entry for launch in everywhere if int(launch.architecture.strip("sm_") or 0) > architecture}
    sources = {launch.entry: launch.source for launch in everywhere if launch.entry not in later}
    some = list(sources.values())[ARCHITECTURES.index(architecture) :: len(ARCHITECTURES) * 4]
    _compile(compiler, some, f"sm_{architecture}")
    from fusec.gpu.stopwatch import SOURCE

    _compile(compiler, [SOURCE], f"sm_{architecture}")
    for only in {launch.architecture for launch in own}:
        found = {launch.entry: launch.source for launch in own if launch.architecture == only}
        _compile(compiler, list(found.values())[::3], only)


def _compile(compiler: Any, some: list[str], architecture: str) -> None:
    program = compiler.createProgram(prelude() + "".join(some), "kernels.cu", (), ())
    try:
        compiler.compileProgram(program, ("--std=c++17", f"--gpu-architecture={architecture}"))
    except compiler.NVRTCError:
        pytest.fail(compiler.getProgramLog(program)[:4000])


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_on_the_device(rng: np.random.Generator, part: int) -> None:
    pytest.importorskip("cupy")
    from fusec.gpu.kernels.launch import Launcher

    launcher = Launcher()
    some = [case for case in cases() if case.kernel is not None][part::PARTS]
    found = [(case, way) for case in some if case.kernel is not None for way in each_way(case.kernel)]
    launcher.compile(way for _, way in found)
    wrong: list[str] = []
    for case, way in found:
        if not launcher.runs(way):  # no room for all its blocks at once
            continue
        arrays = case.arrays(rng)
        try:
            assert_same(case, on_the_device(launcher, way, arrays, case.outputs), case.reference(arrays))
        except AssertionError as error:
            wrong.append(f"{case.name}: {error}")
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_timed_has_a_kernel(name: str) -> None:
    kernel, nbytes = kernel_of(*CASES[name])
    assert kernel is not None and nbytes > 1 << 20
