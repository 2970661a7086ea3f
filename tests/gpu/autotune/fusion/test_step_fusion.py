"""Test which steps are fused into kernels, which are not, and that the program computes the same."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from gpu.autotune.candidates.test_step_candidates import outputs, signatures
from gpu.autotune.squeeze_excite_text import EXCITATION, drawn
from gpu.kernels.cases import FIGURES
from lowering.lowers_judge import LowersJudge

from fusec.execution.compilation import Compiled
from fusec.gpu.autotune.fusion import step_fusion
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.autotune.step_choices import apply_choices, kernel_of, step_key
from fusec.gpu.kernels.product.integer_product import uses_no_tensor_cores
from fusec.passes.base import Options
from fusec.passes.partition import partition
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind
from fusec.targets.target import load
from fusec.text import parse

POOL = "{window=[2, 2], strides=[2, 2], pads=[0, 0, 0, 0], dilations=[1, 1]}"


def compiled(text: str, without: Collection[str] = ()) -> Compiled:
    """Compile a graph. without: the ops that cuDNN refuses."""
    graph, target, judge = parse(text, drawn(text)), load("h200"), LowersJudge(without=without)
    return Compiled(graph, partition(graph, judge, target), target, Options(), judge)


def check(text: str, want: list[str], without: Collection[str] = ()) -> Compiled:
    of = compiled(text, without)
    joined = replace(of, program=fuse_steps(of.program, FIGURES))
    assert signatures(joined.program) == want
    for got, right in zip(outputs(joined), outputs(of), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)
    return joined


def test_an_image_is_cast_and_laid_out_by_one_kernel() -> None:
    of = check(
        """graph "g" (%x: f32[2,3,8,8]) {
  %s = constant [0.5] : f32[]
  %m = mul(%x, %s)
  %h = cast(%m) {to=f16}
  %r = relayout(%h) {order=[0, 2, 3, 1]} : f16[2,3,8,8]{0,2,3,1}
  return %r
}""",
        ["mul+cast+relayout"],
    )
    (step,) = of.program.steps
    assert step.kind is Kind.KERNEL and len(step.nodes) == 3


def test_the_kernel_of_a_pool_runs_the_ops_after_it() -> None:
    check(
        f"""graph "g" (%x: f32[2,8,6,6]{{0,2,3,1}}, %z: f32[2,8,3,3]{{0,2,3,1}}) {{
  %p = max_pool(%x) {POOL} : f32[2,8,3,3]{{0,2,3,1}}
  %a = add(%p, %z)
  %r = relu(%a)
  %e = exp(%r)
  return %e, %r
}}""",
        ["max_pool+add+relu+exp"],
    )


def test_the_kernel_of_a_batch_norm_in_training_runs_the_ops_around_it() -> None:
    """The relu, rather than being a prologue of the convolution after it, and what is made of the statistics."""
    check(
        """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}, %s: f32[8], %b: f32[8], %h: f32[8], %w: f32[8,8,1,1]) {
  %y, %m, %i = batch_norm_train(%x, %s, %b) : f32[2,8,6,6]{0,2,3,1}, f32[8], f32[8]
  %t = mul(%h, %m)
  %r = relu(%y)
  %c = conv(%r, %w) {strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1]}
  return %c, %t, %i
}""",
        ["batch_norm_train+mul+relu", "conv"],
        without=["batch_norm_train"],
    )
    check(
        """graph "g" (%d: f32[2,8,6,6]{0,2,3,1}, %x: f32[2,8,6,6]{0,2,3,1}, %s: f32[8], %m: f32[8], %i: f32[8]) {
  %l = relu_backward(%d, %x)
  %e, %p, %q = batch_norm_backward(%l, %x, %s, %m, %i) : f32[2,8,6,6]{0,2,3,1}, f32[8], f32[8]
  %n = sub(%s, %p)
  return %e, %n, %q, %l
}""",
        ["relu_backward+batch_norm_backward+sub"],
        without=["batch_norm_backward"],
    )


def test_a_mask_of_2_bits_is_stored_by_the_norm_before_the_relu() -> None:
    """It would be of no use within the kernel of the backward half, which would compute it from the relu's result."""
    image = "f16[2,16,6,6]{0,2,3,1}"
    check(
        f"""graph "g" (%x: {image}, %s: f32[16], %b: f32[16], %z: {image}, %w: f16[16,16,1,1]) {{
  %y, %m, %i = batch_norm_train(%x, %s, %b) : {image}, f32[16], f32[16]
  %a = add(%y, %z)
  %r = relu(%a)
  %o = constant [0.0] : f16[]
  %p = cmp_gt(%r, %o)
  %k = cast(%p) {{to=u2}}
  %d = conv(%r, %w) {{strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1]}}
  %l = cast(%k) {{to=bool}}
  %c = where(%l, %d, %o)
  %e, %f, %g = batch_norm_backward(%c, %x, %s, %m, %i) : {image}, f32[16], f32[16]
  return %c, %e, %f, %g
}}""",
        ["batch_norm_train+add+relu+cmp_gt+cast", "conv", "cast+where+batch_norm_backward"],
        without=["batch_norm_train", "batch_norm_backward", "cmp_gt"],
    )


def test_the_kernel_of_a_norm_gradient_reads_a_gradient_without_the_zeros_around_its_pixels() -> None:
    """The sum before the norm is then no epilogue of the other gradient's product."""
    image = "f16[2,16,6,6]{0,2,3,1}"
    window = "pads=[0, 0, 0, 0], dilations=[1, 1], output_padding=[0, 0]"
    check(
        f"""graph "g" (%d: {image}, %w: f16[16,16,1,1], %h: f16[2,32,3,3]{{0,2,3,1}}, %v: f16[32,16,1,1],
 %k: u2[2,16,6,6]{{0,2,3,1}}, %x: {image}, %s: f32[16], %m: f32[16], %i: f32[16]) {{
  %a = conv_transpose(%h, %v) {{strides=[1, 1], {window}}}
  %b = dilate(%a) {{steps=[1, 1, 2, 2], sizes=[2, 16, 6, 6]}}
  %c = conv_transpose(%d, %w) {{strides=[1, 1], {window}}}
  %y = add(%c, %b)
  %l = cast(%k) {{to=bool}}
  %o = constant [0.0] : f16[]
  %z = where(%l, %y, %o)
  %e, %f, %g = batch_norm_backward(%z, %x, %s, %m, %i) : {image}, f32[16], f32[16]
  return %z, %e, %f, %g
}}""",
        ["conv_transpose", "conv_transpose", "dilate+add+cast+where+batch_norm_backward"],
        without=["batch_norm_backward"],
    )


@pytest.mark.parametrize("equal", [True, False])
def test_a_kernel_makes_the_gradients_of_both_norms_of_a_sum(equal: bool) -> None:
    """It then need not store the sum's gradient. Two norms of different gradients are apart."""
    image, second, norm = "f16[2,16,6,6]{0,2,3,1}", "%z" if equal else "%d", "batch_norm_backward"
    check(
        f"""graph "g" (%d: {image}, %h: {image}, %k: u2[2,16,6,6]{{0,2,3,1}}, %x: {image}, %r: {image},
 %s: f32[16], %m: f32[16], %i: f32[16], %t: f32[16], %n: f32[16], %j: f32[16]) {{
  %y = add(%d, %h)
  %l = cast(%k) {{to=bool}}
  %o = constant [0.0] : f16[]
  %z = where(%l, %y, %o)
  %a, %b, %c = batch_norm_backward(%z, %x, %s, %m, %i) : {image}, f32[16], f32[16]
  %e, %f, %g = batch_norm_backward({second}, %r, %t, %n, %j) : {image}, f32[16], f32[16]
  return %a, %b, %c, %e, %f, %g
}}""",
        ["+".join(["add+cast+where", norm, norm])] if equal else [f"add+cast+where+{norm}", norm],
        without=["batch_norm_backward"],
    )


def test_the_kernel_of_a_norm_applies_the_norm_of_its_residual() -> None:
    """The convolution of the residual does not widen its result for that."""
    image = "f16[2,16,6,6]{0,2,3,1}"
    of = compiled(
        f"""graph "g" (%x: {image}, %h: {image}, %w: f16[16,16,1,1], %s: f32[16], %b: f32[16]) {{
  %c = conv(%h, %w) {{strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1]}}
  %y, %m, %i = batch_norm_train(%x, %s, %b) : {image}, f32[16], f32[16]
  %u, %n, %j = batch_norm_train(%c, %s, %b) : {image}, f32[16], f32[16]
  %f = mul(%j, %s)
  %e = mul(%n, %f)
  %t = sub(%b, %e)
  %d = cast(%c) {{to=f32}}
  %g = reshape(%f) {{shape=[1, 16, 1, 1]}}
  %k = mul(%d, %g)
  %l = reshape(%t) {{shape=[1, 16, 1, 1]}}
  %p = add(%k, %l)
  %q = cast(%p) {{to=f16}}
  %a = add(%y, %q)
  %r = relu(%a)
  return %r, %m, %i, %n, %j
}}""",
        without=["batch_norm_train"],
    )
    main = "batch_norm_train+cast+mul+add+cast+add+relu"
    want = ["conv", "batch_norm_train+mul+mul+sub", "reshape", "reshape", main]
    assert signatures(fuse_steps(of.program, FIGURES)) == want


def test_the_kernel_of_a_layer_norm_gradient_adds_the_residual_gradient() -> None:
    """The sum is not fused into the reduction for a bias, because cuDNN runs that reduction here."""
    check(
        """graph "g" (%d: f32[6,40], %x: f32[6,40], %s: f32[40], %z: f32[6,40]) {
  %e, %p, %q = layer_norm_backward(%d, %x, %s) : f32[6,40], f32[40], f32[40]
  %a = add(%e, %z)
  %n = sub(%s, %p)
  %c = reduce(%a) {kind="sum", axes=[0], keepdims=false}
  return %a, %n, %q, %c
}""",
        ["layer_norm_backward+add+sub", "reduce"],
    )


HEADS = """graph "heads" (%x: f32[2,8,4,4]{0,2,3,1}, %z: f32[2,8,2,2]{0,2,3,1}) {
  %a = slice(%x) {starts=[0, 0, 0, 0], sizes=[2, 6, 4, 4], steps=[1, 1, 1, 1]} : f32[2,6,4,4]{0,2,3,1}
  %b = reshape(%a) {shape=[2, 2, 3, 4, 4]} : f32[2,2,3,4,4]{0,3,4,1,2}
  %c = transpose(%b) {perm=[0, 3, 4, 1, 2]}
  %d = reshape(%c) {shape=[2, 32, 3]}
  %e = slice(%z) {starts=[0, 0, 0, 0], sizes=[2, 6, 2, 2], steps=[1, 1, 1, 1]} : f32[2,6,2,2]{0,2,3,1}
  %f = reshape(%e) {shape=[2, 2, 3, 2, 2]} : f32[2,2,3,2,2]{0,3,4,1,2}
  %g = transpose(%f) {perm=[0, 3, 4, 1, 2]}
  %h = reshape(%g) {shape=[2, 8, 3]}
  %y = concat(%d, %h) {axis=1}
  return %y
}"""


def test_a_concat_reads_slices_through_views_where_they_are() -> None:
    views = "reshape+transpose+reshape"
    of = check(HEADS, [f"slice+{views}+slice+{views}+concat"])
    assert of.program.launches == 1


def test_a_slice_that_is_read_elsewhere_too_is_copied() -> None:
    of = check(
        HEADS.replace("return %y", "return %y, %d"),
        ["slice", "reshape", "transpose", "reshape", "slice+reshape+transpose+reshape+concat"],
    )
    assert of.program.launches == 2


def test_a_computed_value_is_not_fused_through_views() -> None:
    """A reduction would run again for each reader, and a pointwise op would lose the order of its memory."""
    check(
        """graph "g" (%x: f32[4,6], %z: f32[3,2,4]) {
  %s = softmax(%x)
  %v = reshape(%s) {shape=[3, 2, 4]}
  %t = transpose(%v) {perm=[1, 0, 2]}
  %u = transpose(%z) {perm=[1, 0, 2]}
  %y = concat(%t, %u) {axis=0}
  return %y
}""",
        ["softmax", "reshape", "transpose+transpose+concat"],
    )


def test_steps_of_cudnn_alone_are_not_fused() -> None:
    text = """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}) {
  %e = exp(%x)
  %r = relu(%e)
  return %r
}"""
    of = compiled(text)
    assert fuse_steps(of.program, FIGURES) is of.program


def test_fusion_makes_no_cycle() -> None:
    """The add reads the softmax through a recurrence, which no kernel fuses, too: they stay apart."""
    check(
        """graph "g" (%x: f32[4,4]) {
  %p = softmax(%x)
  %m = linear_scan(%p, %p) {axis=1}
  %a = add(%p, %m)
  %s = softmax(%a)
  return %s
}""",
        ["softmax", "linear_scan", "add+softmax"],
    )


def test_a_small_factor_is_not_computed_for_every_element_of_a_large_image(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}) {
  %m = reduce(%x) {kind="mean", axes=[2, 3]} : f32[2,8,1,1]{0,2,3,1}
  %s = softmax(%m) {axis=1} : f32[2,8,1,1]{0,2,3,1}
  %g = sigmoid(%s) : f32[2,8,1,1]{0,2,3,1}
  %y = mul(%x, %g) : f32[2,8,6,6]{0,2,3,1}
  return %y
}"""
    of = compiled(text)
    small = signatures(fuse_steps(of.program, FIGURES))
    monkeypatch.setattr(step_fusion, "MAX_REPEATED", 0)
    large = signatures(fuse_steps(of.program, FIGURES))
    assert "softmax+sigmoid" in small and "softmax+sigmoid" in large
    assert small[-1] == large[-1] == "mul"


def test_a_squeeze_and_excitation_is_one_kernel_up_to_its_product() -> None:
    of = compiled(EXCITATION)
    apart = [step.signature for step in fuse_steps(of.program, FIGURES).steps]
    assert "reduce" in " ".join(apart) and len(apart) > 3
    united = replace(of, program=fuse_steps(of.program, FIGURES, products=True))
    assert signatures(united.program) == ["conv+bias+swish+reduce+conv+relu+conv+sigmoid", "mul"]
    for got, right in zip(outputs(united), outputs(of), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


def test_steps_with_another_step_between_them_are_not_fused() -> None:
    text = EXCITATION.replace("%a = relu(%h)", "%a = softmax(%h) {axis=1}")
    united = fuse_steps(compiled(text).program, FIGURES, products=True)
    assert signatures(united)[0] == "conv+bias+swish+reduce"
    assert sum(step.kind is Kind.CUDNN for step in united.steps) >= 2


def test_a_rotary_embedding_reads_its_part_of_a_projection() -> None:
    check(
        """graph "g" (%x: f32[2,5,6,8], %c: f32[5,1,8], %s: f32[5,1,8]) {
  %p = slice(%x) {starts=[0, 0, 1, 0], sizes=[2, 5, 4, 8], steps=[1, 1, 1, 1]}
  %r = rotary(%p, %c, %s)
  return %r
}""",
        ["slice+rotary"],
    )


def test_kernels_of_convolutions_run_the_ops_around_them() -> None:
    """The fourth channel of an image, tanh and channels first; a pool goes to the norm before it."""
    of = compiled(
        f"""graph "g" (%x: f16[1,3,48,48], %s: f16[32], %b: f16[32],
  %w: f16[32,4,7,7]{{0,2,3,1}}, %v: f16[3,32,7,7]{{0,2,3,1}}) {{
  %p = pad(%x) {{pads=[0, 0, 0, 0, 0, 1, 0, 0]}} : f16[1,4,48,48]{{0,2,3,1}}
  %c = conv(%p, %w) {{strides=[1, 1], pads=[3, 3, 3, 3], dilations=[1, 1]}} : f16[1,32,48,48]{{0,2,3,1}}
  %n = instance_norm(%c, %s, %b)
  %r = relu(%n)
  %q = max_pool(%r) {POOL}
  %h = conv(%q, %v) {{strides=[1, 1], pads=[3, 3, 3, 3], dilations=[1, 1]}} : f16[1,3,24,24]{{0,2,3,1}}
  %t = tanh(%h)
  %y = relayout(%t) {{order=[0, 1, 2, 3]}} : f16[1,3,24,24]
  return %y
}}"""
    )
    chosen = {
        step_key(of.graph, step): (Part(len(step.nodes), "kernel"),)
        for step in of.program.steps
        if any(node.op.name in ("conv", "instance_norm") for node in step.nodes)
    }
    joined = replace(of, program=apply_choices(of.program, chosen, FIGURES))
    assert signatures(joined.program) == ["pad+conv", "instance_norm+relu+max_pool", "conv+tanh+relayout"]
    assert {step.kind for step in joined.program.steps} == {Kind.KERNEL}
    for got, right in zip(outputs(joined), outputs(of), strict=True):
        np.testing.assert_allclose(got, right, rtol=2e-2, atol=2e-2)


def test_the_kernel_of_a_first_convolution_finds_the_largest_of_windows() -> None:
    """As in ResNet, whose second convolution reads the pool's result alone."""
    of = compiled(
        """graph "g" (%x: f32[1,3,48,48], %w: f16[64,4,7,7]{0,2,3,1}, %v: f16[64,64,1,1]{0,2,3,1}) {
  %h = cast(%x) {to=f16}
  %p = pad(%h) {pads=[0, 0, 0, 0, 0, 1, 0, 0]} : f16[1,4,48,48]{0,2,3,1}
  %c = conv(%p, %w) {strides=[2, 2], pads=[3, 3, 3, 3], dilations=[1, 1]} : f16[1,64,24,24]{0,2,3,1}
  %r = relu(%c)
  %q = max_pool(%r) {window=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], dilations=[1, 1]} : f16[1,64,12,12]{0,2,3,1}
  %y = conv(%q, %v) {strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1]} : f16[1,64,12,12]{0,2,3,1}
  return %y
}"""
    )
    first = next(step for step in of.program.steps if any(node.op.name == "conv" for node in step.nodes))
    chosen = {step_key(of.graph, first): (Part(len(first.nodes), "kernel"),)}
    joined = replace(of, program=apply_choices(of.program, chosen, FIGURES))
    assert signatures(joined.program) == ["cast+pad+conv+relu+max_pool", "conv"]
    for got, right in zip(outputs(joined), outputs(of), strict=True):
        np.testing.assert_allclose(got, right, rtol=2e-2, atol=2e-2)


def test_fusion_does_not_take_a_product_from_tensor_cores() -> None:
    """A kernel of integers of any type could run the product with the cast before it, but without tensor cores."""
    of = compiled(
        """graph "g" (%x: i8[64,640], %z: u8[], %s: f32[]) {
  %w = constant weight("w") : i8[640,128]
  %p = matmul(%x, %w)
  %f = cast(%z) {to=f32}
  %g = cast(%p) {to=f32}
  %d = sub(%g, %f)
  %y = mul(%d, %s)
  return %y
}"""
    )
    (product,) = [step for step in of.program.steps if any(node.op.name == "matmul" for node in step.nodes)]
    chosen = {step_key(of.graph, product): (Part(len(product.nodes), "kernel"),)}
    program = apply_choices(of.program, chosen, FIGURES)
    assert sorted(signatures(program)) == ["cast", "matmul+cast+sub+mul"]
    assert not any(uses_no_tensor_cores(kernel_of(step.nodes, FIGURES)) for step in program.steps)
