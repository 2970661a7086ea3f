"""Test products whose weights alone are quantised: packed for few rows, dequantised at compile time for more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.kernels.emulator import Emulator, needs_compiler
from helpers import one_program, relative_l2
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import fusec
from fusec.diagnostics.explain.float_edges import float_edges
from fusec.gpu import kernels
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.autotune.step_choices import apply_choices, step_key
from fusec.ir import DType
from fusec.lowering.packing import code_bytes
from fusec.ops import PackedMatMul
from fusec.passes.partition.equivalent_spellings import UNPACKED
from fusec.plans.plan_record import Part
from fusec.targets.target import load as load_target

pytestmark = pytest.mark.cudnn

BITS = {4: (TensorProto.INT4, TensorProto.UINT4), 8: (TensorProto.INT8, TensorProto.UINT8)}
Array = np.ndarray


@dataclass(frozen=True)
class Model:
    """A product, and its weight [depth, columns] in float64."""

    proto: ModelProto
    weight: Array

    def feeds(self, rng: np.random.Generator) -> dict[str, Array]:
        (x,) = self.proto.graph.input
        shape = [d.dim_value for d in x.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
        return {"x": rng.standard_normal(shape).astype(dtype)}


def dequantised(
    rng: np.random.Generator,
    bits: int = 4,
    axis: int = 0,
    block: int = 32,
    *,
    rows: int = 1,
    signed: bool = True,
    zeros: bool = False,
    transposed: bool = False,
    columns: int = 96,
    floats: type = np.float16,
) -> Model:
    """Make a product with a weight that DequantizeLinear scales, in blocks, or along `axis` if block is 0.

    transposed: Gemm reads the weight as [columns, depth].
    """
    depth = 256
    shape = [columns, depth] if transposed else [depth, columns]
    low = -(1 << (bits - 1)) if signed else 0
    codes = rng.integers(low, low + (1 << bits), shape)
    small = [shape[axis]]
    if block:
        small = list(shape)
        small[axis] //= block
    scales = rng.uniform(0.5, 1.5, small).astype(floats) / floats(1 << bits)
    zero = rng.integers(low, low + (1 << bits), small) if zeros else np.zeros(small, np.int64)

    def wide(v: Array) -> Array:
        if block:
            return np.repeat(v, block, axis)
        return np.expand_dims(v, 1 - axis)

    weight = (codes - wide(zero)) * wide(scales.astype(np.float64))
    kind, real = BITS[bits][not signed], helper.np_dtype_to_tensor_dtype(np.dtype(floats))
    tensors = [
        helper.make_tensor("q", kind, shape, codes.reshape(-1).tolist()),
        numpy_helper.from_array(scales, "s"),
        *([helper.make_tensor("z", kind, small, zero.reshape(-1).tolist())] if zeros else []),
    ]
    given: dict[str, Any] = {"axis": axis, **({"block_size": block} if block else {})}
    nodes = [
        helper.make_node("DequantizeLinear", [t.name for t in tensors], ["w"], **given),
        helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
        if transposed
        else helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    return Model(_model(nodes, tensors, (rows, depth), real), weight.T if transposed else weight)


def n_bits(
    rng: np.random.Generator,
    bits: int = 4,
    block: int = 32,
    *,
    depth: int = 256,
    zeros: bool = False,
    floats: type = np.float16,
) -> Model:
    """Make a MatMulNBits of two rows. The last block may reach beyond the depth."""
    columns, blocks = 64, -(-depth // block)
    codes = rng.integers(0, 1 << bits, (columns, blocks, block))
    zero = rng.integers(0, 1 << bits, (columns, blocks)) if zeros else np.full((columns, blocks), 1 << (bits - 1))
    scales = rng.uniform(0.5, 1.5, (columns, blocks)).astype(floats) / floats(1 << bits)

    def packed(v: Array) -> Array:
        pairs = v.reshape(*v.shape[:-1], -1, 8 // bits)
        return (pairs << np.arange(0, 8, bits)).sum(-1).astype(np.uint8)

    tensors = [numpy_helper.from_array(packed(codes), "q"), numpy_helper.from_array(scales.reshape(-1), "s")]
    tensors += [numpy_helper.from_array(packed(zero).reshape(-1), "z")] if zeros else []
    names = ["x", *(t.name for t in tensors)]
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain="com.microsoft", K=depth, N=columns, bits=bits, block_size=block
    )
    weight = (codes - zero[..., None]) * scales[..., None].astype(np.float64)
    real = helper.np_dtype_to_tensor_dtype(np.dtype(floats))
    return Model(_model([node], tensors, (2, depth), real), weight.reshape(columns, -1)[:, :depth].T)


def _model(nodes: list[NodeProto], tensors: list[TensorProto], shape: tuple[int, ...], real: int) -> ModelProto:
    x, y = helper.make_tensor_value_info("x", real, shape), helper.make_tensor_value_info("y", real, None)
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def packed_step(net: fusec.Executable) -> PackedMatMul | None:
    """The packed product of a program, whose kernel exists."""
    for step in net.compiled.program.steps:
        if isinstance(step.nodes[0].op, PackedMatMul):
            assert kernels.find(step.nodes, step.outputs, net.compiled.figures) is not None
            return step.nodes[0].op
    return None


def cases() -> list[tuple[str, Callable[[np.random.Generator], Model]]]:
    f32 = np.float32
    return [
        ("blocks of rows", lambda rng: dequantised(rng)),
        ("8 bits in blocks", lambda rng: dequantised(rng, 8, block=64)),
        ("zero points", lambda rng: dequantised(rng, zeros=True)),
        ("unsigned", lambda rng: dequantised(rng, signed=False, zeros=True, floats=f32)),
        ("unsigned bytes", lambda rng: dequantised(rng, 8, signed=False, zeros=True, block=16)),
        ("scales of columns", lambda rng: dequantised(rng, axis=1, block=0)),
        ("bytes by columns", lambda rng: dequantised(rng, 8, axis=1, block=0, floats=f32)),
        ("Gemm", lambda rng: dequantised(rng, axis=1, transposed=True, rows=16)),
        ("Gemm by columns", lambda rng: dequantised(rng, 8, axis=0, block=0, transposed=True, zeros=True)),
        ("MatMulNBits", n_bits),
        ("MatMulNBits zeros", lambda rng: n_bits(rng, zeros=True, floats=f32)),
        ("MatMulNBits bytes", lambda rng: n_bits(rng, 8, 128, zeros=True)),
        ("MatMulNBits with half a block", lambda rng: n_bits(rng, 4, 128, depth=192, zeros=True)),
        ("MatMulNBits bytes of 128", lambda rng: n_bits(rng, 8, 64)),
    ]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("make", [make for _, make in cases()], ids=[name for name, _ in cases()])
def test_weights_of_few_rows_stay_packed(
    make: Callable[[np.random.Generator], Model], precision: str, rng: np.random.Generator
) -> None:
    model = make(rng)
    net = one_program(fusec.compile(model.proto, target="h200", precision=precision, simulate=True))
    assert packed_step(net) is not None
    feeds = model.feeds(rng)
    want = feeds["x"].astype(np.float64) @ model.weight
    half = DType.BF16 if precision == "bf16" and feeds["x"].dtype == np.float32 else DType.F16
    assert relative_l2(np.asarray(net.run(None, feeds)[0]), want) < half.epsilon


@pytest.mark.parametrize(
    ("why", "make", "options"),
    [
        ("17 rows", lambda rng: dequantised(rng, rows=17), {}),
        ("blocks along the columns", lambda rng: dequantised(rng, axis=1), {}),
        ("fp32", lambda rng: dequantised(rng, floats=np.float32), {"precision": "fp32"}),
        ("rounded as the source", lambda rng: dequantised(rng), {"rounding": "source"}),
        ("no tensor cores for it", lambda rng: dequantised(rng), {"target": "t4"}),
    ],
)
def test_others_are_dequantised_at_compile_time(
    why: str, make: Callable[[np.random.Generator], Model], options: dict[str, Any], rng: np.random.Generator
) -> None:
    """A call runs the product alone: scales that were repeated for each weight would be too large to fold."""
    model = make(rng)
    given: dict[str, Any] = {"target": "h200", "precision": "fp16", **options}
    net = one_program(fusec.compile(model.proto, **given, simulate=True))
    assert [step.signature for step in net.compiled.program.steps] == ["matmul"], why
    feeds = model.feeds(rng)
    got = np.asarray(net.run(None, feeds)[0])
    assert relative_l2(got, feeds["x"].astype(np.float64) @ model.weight) < 2e-3


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_scales_of_fp32_are_not_rounded(precision: str, rng: np.random.Generator) -> None:
    """Rounded to 16 bits, one scale would move 32 weights, and small ones would lose all digits."""
    net = one_program(
        fusec.compile(dequantised(rng, floats=np.float32).proto, target="h200", precision=precision, simulate=True)
    )
    products = [n for s in net.compiled.program.steps for n in s.nodes if isinstance(n.op, PackedMatMul)]
    assert [node.operands[2].type.dtype for node in products] == [DType.F32]


def test_the_numpy_target_dequantises_once(rng: np.random.Generator) -> None:
    net = one_program(fusec.compile(n_bits(rng).proto, target="cpu", precision="fp16"))
    assert packed_step(net) is None


def test_a_file_holds_the_model_and_its_program_reads_packed_weights(tmp_path: Path, rng: np.random.Generator) -> None:
    model = dequantised(rng, zeros=True)
    net = one_program(fusec.compile(model.proto, target="h200", precision="fp16", simulate=True))
    net.save(tmp_path / "model.fusec")
    back = fusec.load(tmp_path / "model.fusec", simulate=True)
    assert str(back.compiled.program) == str(net.compiled.program)
    feeds = model.feeds(rng)
    assert np.array_equal(np.asarray(back.run(None, feeds)[0]), np.asarray(net.run(None, feeds)[0]))
    (step,) = back.compiled.program.steps
    kernel = kernels.find(step.nodes, step.outputs, back.compiled.figures)
    assert kernel is not None
    read = [a for a in kernel.launches[0].arguments if a.value is not None and a.value.literal is not None]
    sizes = [code_bytes(a.type.size, a.type.dtype) for a in read if a.type is not None]
    assert sorted(sizes) == [8 * 96 // 2, 8 * 96 * 4, 256 * 96 // 2]  # few scales become fp32 at import


def test_other_weights_give_the_same_kernel_and_other_results(rng: np.random.Generator) -> None:
    both = (fusec.compile(n_bits(rng).proto, target="h200", precision="fp16", simulate=True) for _ in range(2))
    nets = [one_program(each) for each in both]
    found = [kernels.find(s.nodes, s.outputs, net.compiled.figures) for net in nets for s in net.compiled.program.steps]
    assert len({kernel.key for kernel in found if kernel is not None}) == 1
    x = rng.standard_normal((2, 256)).astype(np.float16)
    first, second = (np.asarray(net.run(None, {"x": x})[0]) for net in nets)
    assert not np.array_equal(first, second)


def test_sizes_of_one_model_choose_for_themselves(rng: np.random.Generator) -> None:
    model = dequantised(rng)
    model.proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    net = fusec.compile_dynamic(model.proto, target="h200", precision="fp16", simulate=True)
    for rows in (1, 17, 16):
        x = rng.standard_normal((rows, 256)).astype(np.float16)
        assert relative_l2(np.asarray(net.run(None, {"x": x})[0]), x.astype(np.float64) @ model.weight) < 2e-3


def test_the_ridge_of_all_targets_is_beyond_the_rows() -> None:
    """Up to 16 rows memory bounds the product on every GPU: 4 operations a row for each byte of 4-bit weights."""
    for name in ("a100", "l4", "h200", "b200"):
        target = load_target(name)
        assert target.flops["fp16"] / target.memory_bandwidth > 16 * 4, name


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"rows": 32}, "the product has 32 rows, not 1 to 16"),
        ({"precision": "fp32", "floats": np.float32}, "the product is not computed in 16 bits"),
        ({"target": "t4"}, "t4 has no tensor cores for them"),
        ({"block": 16, "zeros": True, "columns": 24}, "the kernel does not read [256, 24] in blocks of 16"),
    ],
)
def test_explain_tells_why_weights_do_not_stay_packed(
    options: dict[str, Any], why: str, rng: np.random.Generator
) -> None:
    given: dict[str, Any] = {"target": "h200", "precision": "fp16"} | {
        k: v for k, v in options.items() if isinstance(v, str)
    }
    model = dequantised(rng, **{k: v for k, v in options.items() if k not in given})
    edges = float_edges(one_program(fusec.compile(model.proto, **given, simulate=True)).compiled)
    assert [edge.reason for edge in edges] == (
        [f"its weights alone are quantised, and do not stay packed: {why}"] if why else []
    )


def test_explain_tells_if_floats_were_faster(rng: np.random.Generator) -> None:
    compiled = one_program(
        fusec.compile(dequantised(rng).proto, target="h200", precision="fp16", simulate=True)
    ).compiled
    (step,) = compiled.program.steps
    choice = (Part(len(step.nodes), "cudnn", (UNPACKED,)),)
    program = apply_choices(compiled.program, {step_key(compiled.program.graph, step): choice}, compiled.figures)
    (edge,) = float_edges(replace(compiled, program=program))
    assert edge.reason == "its weights are unpacked at compile time: measured to be faster"


def test_explain_counts_packed_bytes(rng: np.random.Generator) -> None:
    net = one_program(fusec.compile(dequantised(rng).proto, target="h200", precision="fp16", simulate=True))
    (step,) = net.explain().steps
    assert step.read_bytes == 256 * 2 + 256 * 96 // 2 + 8 * 96 * 4


@needs_compiler
@pytest.mark.parametrize("form", ["weights-int4", "weights-int8"])
def test_kernels_of_a_quantised_model_compute_it(form: str, rng: np.random.Generator) -> None:
    """With what follows them in their kernels, through the emulator."""
    weights = [(rng.standard_normal(shape) / 16).astype(np.float32) for shape in ((256, 128), (64, 128), (64,))]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w1", "w2"], ["y"], transB=1),
    ]
    tensors = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    quantised = fusec.quantize(_model(nodes, tensors, (2, 256), TensorProto.FLOAT), {}, format=form).model
    x = rng.standard_normal((2, 256)).astype(np.float32)
    (want,) = fusec.compile(quantised, target="cpu").run(None, {"x": x})
    compiled = one_program(fusec.compile(quantised, target="h200", precision="fp16", simulate=True)).compiled
    program = fuse_steps(compiled.program, compiled.figures)
    assert [step.signature for step in program.steps] == ["cast", "packed_matmul+relu", "packed_matmul+bias+cast"]
    held = {v: v.literal.array for v in program.graph.values() if v.literal is not None}
    held[program.graph.inputs[0]] = x
    for step in program.steps:
        kernel = kernels.find(step.nodes, step.outputs, compiled.figures)
        assert kernel is not None
        held.update(zip(step.outputs, Emulator([kernel]).run(kernel, held, step.outputs), strict=True))
    assert relative_l2(held[program.graph.outputs[0]], np.asarray(want)) < 2e-3
