"""Test that every kernel's source compiles for every target, without a GPU, and that a GPU computes it right."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from gpu.kernels.attention.cached.test_cached_attention import cached_cases
from gpu.kernels.attention.cached.test_rotary import cases as rotary_cases
from gpu.kernels.attention.cached.test_streamed_attention import streamed_cases as streamed_attentions
from gpu.kernels.attention.cached.test_write_rows import cases as row_write_cases
from gpu.kernels.attention.test_attention_backward import backward_cases
from gpu.kernels.attention.test_attention_forward import attention_cases
from gpu.kernels.attention.test_score_bias import bias_cases
from gpu.kernels.cases import Case, assert_same, each_way, on_the_device
from gpu.kernels.compile_in_child import logs_of
from gpu.kernels.convolution.test_deform_conv import deform_cases
from gpu.kernels.convolution.test_depthwise import random_cases as depthwise_cases
from gpu.kernels.convolution.test_few_channels import grouped_cases as few_channels_grouped
from gpu.kernels.convolution.test_few_channels import pooled_cases as few_channels_pooled
from gpu.kernels.convolution.test_few_channels import random_cases as few_channels_cases
from gpu.kernels.convolution.test_few_filters import random_cases as few_filters_cases
from gpu.kernels.convolution.test_few_filters import wide_cases
from gpu.kernels.convolution.test_filter_gradient import gradient_cases
from gpu.kernels.convolution.test_frame_products import frame_cases
from gpu.kernels.convolution.test_grouped_conv2d import grouped_cases
from gpu.kernels.convolution.test_resident_filters import resident_cases
from gpu.kernels.convolution.test_split_k import few_cases as few_pixels_cases
from gpu.kernels.convolution.test_squeeze_excite import gate_cases
from gpu.kernels.elementwise.test_gather_resize import among_pointwise_ops as around_samples
from gpu.kernels.elementwise.test_gather_resize import dilate_cases, gather_cases, pad_cases, resize_cases
from gpu.kernels.elementwise.test_multi_tensor import list_cases
from gpu.kernels.elementwise.test_narrow_types import cases as narrow_cases
from gpu.kernels.elementwise.test_pointwise import cast_cases, op_cases, shape_cases
from gpu.kernels.elementwise.test_relayout import among_pointwise_ops, move_cases
from gpu.kernels.elementwise.test_scatter import scatter_cases
from gpu.kernels.elementwise.test_unaligned_copy import random_cases as unaligned_cases
from gpu.kernels.norm.batch_norm.test_batch_norm import bit_masks, channel_cases, surrounded_channels
from gpu.kernels.norm.batch_norm.test_batch_norm_dilated import dilated_cases
from gpu.kernels.norm.batch_norm.test_batch_norm_pair import cases as pair_cases
from gpu.kernels.norm.test_group_norm import cases as group_norm_cases
from gpu.kernels.norm.test_instance_norm import cases as instance_cases
from gpu.kernels.norm.test_layer_norm_backward import norm_backward_cases, surrounded_norm_backward
from gpu.kernels.norm.test_row_reduction import normed, reductions, several, surrounded
from gpu.kernels.pooling.test_pool_forward import random_backward_cases, random_cases
from gpu.kernels.pooling.test_roi_align import random_cases as region_cases
from gpu.kernels.product.few_rows.test_few_rows import few_rows_cases
from gpu.kernels.product.few_rows.test_streamed_weights import streamed_cases as streamed_products
from gpu.kernels.product.int8.test_dense_bytes import dense_cases
from gpu.kernels.product.int8.test_resident_weights import resident_cases as resident_weight_cases
from gpu.kernels.product.packed.test_packed_product import packed_cases
from gpu.kernels.product.test_integer_product import integer_cases
from gpu.kernels.product.test_thin_product import thin_cases
from gpu.kernels.recurrent.test_cumulate import cumulate_cases
from gpu.kernels.recurrent.test_linear_scan import scan_cases
from gpu.kernels.recurrent.test_recurrent import recurrent_cases
from gpu.kernels.recurrent.test_scan import loop_cases
from gpu.kernels.selection.test_arg_max import arg_max_cases
from gpu.kernels.selection.test_non_max_suppression import random_cases as suppression_cases
from gpu.kernels.selection.test_top_k import random_cases as top_k_cases
from helpers import quick

from benchmarks.kernels.kernel_cases import CASES
from benchmarks.kernels.kernel_times import kernel_of
from fusec.gpu.kernels.codegen.kernel import Launch, prelude
from fusec.targets.target import DEFAULT, load, names

ARCHITECTURES = sorted({load(name).sm for name in names()} | {120})


def cases() -> list[Case]:
    return [*cases_of_one_form(), *shaped_cases()]


def cases_of_one_form() -> list[Case]:
    """Ops and types in kernels of one form, of which a GPU's figures change the number of blocks only."""
    return [*op_cases(), *cast_cases(), *narrow_cases()]


def shaped_cases() -> list[Case]:
    return [
        *shape_cases(),
        *random_cases(),
        *random_backward_cases(),
        *region_cases(),
        *suppression_cases(),
        *top_k_cases(),
        *arg_max_cases(),
        *reductions(),
        *several(),
        *normed(),
        *surrounded(),
        *attention_cases(),
        *bias_cases(),
        *backward_cases(),
        *cached_cases(),
        *channel_cases(),
        *surrounded_channels(),
        *bit_masks(),
        *pair_cases(),
        *norm_backward_cases(),
        *surrounded_norm_backward(),
        *depthwise_cases(),
        *gate_cases(),
        *thin_cases(),
        *dense_cases(),
        *resident_weight_cases(),
        *few_channels_cases(),
        *few_channels_grouped(),
        *few_channels_pooled(),
        *frame_cases(),
        *gradient_cases(),
        *few_filters_cases(),
        *wide_cases(),
        *grouped_cases(),
        *deform_cases(),
        *few_pixels_cases(),
        *resident_cases(),
        *instance_cases(),
        *group_norm_cases(),
        *move_cases(),
        *among_pointwise_ops(),
        *resize_cases(),
        *pad_cases(),
        *dilate_cases(),
        *dilated_cases(),
        *unaligned_cases(),
        *gather_cases(),
        *around_samples(),
        *rotary_cases(),
        *row_write_cases(),
        *list_cases(),
        *integer_cases(),
        *few_rows_cases(),
        *streamed_products(),
        *streamed_attentions(),
        *packed_cases(),
        *recurrent_cases(),
        *scan_cases(),
        *loop_cases(),
        *cumulate_cases(),
        *scatter_cases(),
    ]


PARTS = 12  # for as many processes


def nvrtc() -> Any:
    try:
        from cupy import cuda

        nvrtc: Any = cuda.nvrtc
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no NVRTC: {error}")
    return nvrtc


@cache
def launches() -> list[Launch]:
    """All launches of the cases' kernels, each source once."""
    kernels = [case.kernel for case in cases()]
    ways = [way for kernel in kernels if kernel is not None for way in (kernel, *kernel.others)]
    return list({launch.entry: launch for way in ways for launch in way.launches}.values())


def reads_as_the_one_before(architecture: int) -> bool:
    """Tell if the prelude is the same for the architecture before; other sources depend on none."""
    bounds = {int(bound) for bound in re.findall(r"__CUDA_ARCH__ >= (\d+)", prelude())}
    before = ARCHITECTURES[max(ARCHITECTURES.index(architecture) - 1, 0)]
    return before < architecture and not any(before * 10 < bound <= architecture * 10 for bound in bounds)


def one_of_each(some: list[Launch], turn: int, by_type: bool) -> list[Launch]:
    """One source of each template, and of the types in it: another one each turn."""
    groups: dict[tuple[str, ...], list[Launch]] = {}
    for launch in some:
        types = [word for word in ("bf16", "f16", "f64", "f8", "double") if by_type and word in launch.source]
        groups.setdefault((launch.entry.rpartition("_")[0], *types), []).append(launch)
    return [group[turn * len(group) // len(ARCHITECTURES)] for group in groups.values()]


@pytest.mark.cudnn
@pytest.mark.parametrize("architecture", quick(ARCHITECTURES, [90]))
def test_sources_compile(architecture: int) -> None:
    """On one architecture as for a GPU, on others without optimising, which takes most of the time."""
    compiler = nvrtc()
    everywhere = [launch for launch in launches() if not launch.architecture.endswith("a")]
    runs = [each for each in everywhere if int(each.architecture.strip("sm_") or 0) <= architecture]
    from fusec.gpu.launch.reorder import WIDTHS, source_of_codes
    from fusec.gpu.launch.reorder import source_of as reorder_of
    from fusec.gpu.measure.device_distance import TYPES
    from fusec.gpu.measure.device_distance import source_of as distance_of
    from fusec.gpu.measure.timer import SOURCE

    some = one_of_each(runs, ARCHITECTURES.index(architecture), not reads_as_the_one_before(architecture))
    assert not any("__CUDA_ARCH__" in launch.source for launch in launches())
    fast = ["--Ofast-compile=max"] if compiler.getVersion() >= (12, 9) else []
    small = [*map(distance_of, TYPES), *map(reorder_of, WIDTHS), *map(source_of_codes, (2, 4))]
    _check_compile(["".join((SOURCE, *small, *(launch.source for launch in some)))], f"sm_{architecture}", *fast)
    own = [launch for launch in launches() if launch.architecture.rstrip("a") == f"sm_{architecture}"][::3]
    for exact in sorted({launch.architecture for launch in own}):
        # each alone, as for a GPU: ptxas lets products wait in a large program sooner
        _check_compile([launch.source for launch in own if launch.architecture == exact], exact)


@pytest.mark.cudnn
def test_products_of_warpgroups_do_not_wait_for_each_other() -> None:
    """ptxas makes each product wait for the one before where it cannot prove that registers are free."""
    some = [kernel_of(*case, load("h200"))[0] for name, case in CASES.items() if "ttention" in name]
    ways = [way for kernel in some if kernel is not None for way in (kernel, *kernel.others)]
    own = [launch for way in ways for launch in way.launches if launch.architecture == "sm_90a"]
    assert {launch.entry.rpartition("_")[0] for launch in own} == {"attention", "attention_backward"}
    nvrtc()
    _check_compile(["".join({launch.entry: launch.source for launch in own}.values())], "sm_90a")


@pytest.mark.slow
@pytest.mark.cudnn
def test_sources_compile_as_for_a_gpu() -> None:
    nvrtc()
    _check_compile(["".join([each.source for each in launches() if not each.architecture][::24])], "sm_90")


def _check_compile(sources: list[str], architecture: str, *options: str) -> None:
    """Check that each source compiles after the prelude, and that products of warpgroups run at the same time."""
    options = ("--std=c++17", f"--gpu-architecture={architecture}", *options)
    for good, log in logs_of([prelude() + source for source in sources], options):
        assert good, log[:4000]
        assert "instructions are serialized" not in log, log


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_on_the_device(rng: np.random.Generator, part: int) -> None:
    pytest.importorskip("cupy")
    from fusec.gpu.launch.kernel_launcher import Launcher

    launcher = Launcher()
    some = [case for case in cases() if case.kernel is not None][part::PARTS]
    found = [(case, way) for case in some if case.kernel is not None for way in each_way(case.kernel)]
    launcher.compile(way for _, way in found)
    wrong: list[str] = []
    for case, way in found:
        if not launcher.runs(way):  # no room for all its blocks
            continue
        arrays = case.arrays(rng)
        try:
            got = on_the_device(launcher, way, arrays, case.outputs)
            ties = max(1e-5, *(1 / max(1, v.type.size) for v in case.outputs)) if case.fused else case.near
            assert_same(replace(case, near=ties), got, case.reference(arrays), case.magnitudes(arrays))
        except AssertionError as error:
            wrong.append(f"{case.name} by {[launch.entry for launch in way.launches]}: {error}")
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_timed_has_a_kernel(name: str) -> None:
    kernel, nbytes = kernel_of(*CASES[name], load(DEFAULT))
    longer_than_a_launch = nbytes > 1 << 20 or any(word in name for word in ("k, ", "suppression", " and gate"))
    assert kernel is not None and longer_than_a_launch, "it would time a launch"
