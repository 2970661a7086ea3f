"""Export of every op as ONNX: the checker accepts it, and the front end imports it with the same meaning."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from ops.cases import CASES, Case

from fusec import frontends
from fusec.errors import LoweringError
from fusec.exporters.onnx import EXPORT, to_onnx
from fusec.ir import DType, Graph, TensorType
from fusec.ops import BY_NAME, Cast, RandomBits, Resize
from fusec.reference import evaluate

REFUSED = "random_bits"
SPLIT = "non_max_suppression"  # imported again, it is a model of two segments
FLAT = [
    pytest.param(case, id=f"{name}-{i}")
    for name, cases in CASES.items()
    for i, case in enumerate(cases)
    if name not in (REFUSED, SPLIT)
]


def test_every_op_has_an_export() -> None:
    assert set(EXPORT) == set(BY_NAME)


def test_random_bits_are_refused() -> None:
    graph = Graph("g")
    state = graph.add_input("state", TensorType((2,), DType.U64))
    op = RandomBits((4,))
    assert op.name == REFUSED
    graph.set_outputs([graph.add(op, state)])
    with pytest.raises(LoweringError, match="no random bits that follow from a state"):
        to_onnx(graph)


@pytest.mark.parametrize("case", FLAT)
def test_an_exported_op_is_imported_with_equal_results(case: Case, rng: np.random.Generator) -> None:
    graph, feeds = Graph("g"), {}
    for i, array in enumerate(case.arrays(rng)):
        feeds[f"x{i}"] = array
        graph.add_input(f"x{i}", TensorType(array.shape, DType.of(array.dtype)))
    results = graph.insert(case.op, graph.inputs).results
    graph.set_outputs(results, [f"y{i}" for i in range(len(results))])
    model = to_onnx(graph)
    onnx.checker.check_model(model)
    indexed = case.op.name == "gather"
    back = frontends.load(model.SerializeToString())
    assert back.output_names == graph.output_names
    got, want = (evaluate(g, feeds, precision=DType.F64) for g in (back, graph))
    for name, array in want.items():
        assert got[name].dtype == array.dtype or indexed
        np.testing.assert_allclose(got[name], array, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES[SPLIT])
def test_an_exported_suppression_is_that_of_onnxruntime(case: Case, rng: np.random.Generator) -> None:
    arrays = case.arrays(rng)
    for dtype in (DType.F32, DType.F16):
        graph = Graph("g")
        given = [array.astype(dtype.numpy) for array in arrays]
        for i, array in enumerate(given):
            graph.add_input(f"x{i}", TensorType(array.shape, dtype))
        graph.set_outputs(graph.insert(case.op, graph.inputs).results, ["rows", "count"])
        session = onnxruntime.InferenceSession(to_onnx(graph).SerializeToString(), providers=["CPUExecutionProvider"])
        got = session.run(None, {f"x{i}": array for i, array in enumerate(given)})
        for one, want in zip(got, case.op.reference(np, *given), strict=True):
            np.testing.assert_array_equal(one, want)


@pytest.mark.parametrize("dtype", [DType.I4, DType.U4, DType.I2, DType.U2, DType.F4E2M1])
def test_constants_below_8_bits_share_bytes(dtype: DType) -> None:
    graph = Graph("g")
    numbers = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0]]).astype(dtype.numpy)
    graph.set_outputs([graph.add(Cast(DType.F32), graph.constant(numbers, "c"))], ["y"])
    model = to_onnx(graph)
    onnx.checker.check_model(model)
    (back,) = evaluate(frontends.load(model.SerializeToString()), {}).values()
    assert np.array_equal(back, numbers.astype(np.float32))


def test_equal_names_are_made_distinct() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((2,), DType.F32))
    y = graph.add(BY_NAME["relu"](), x, name="out")
    z = graph.add(BY_NAME["neg"](), y, name="z")
    graph.set_outputs([z, x, y, y], ["out", "same", "z", "again"])
    back = frontends.load(to_onnx(graph).SerializeToString())
    feeds = {"x": np.array([1.0, -2.0], np.float32)}
    assert {k: v.tolist() for k, v in evaluate(back, feeds).items()} == {
        k: v.tolist() for k, v in evaluate(graph, feeds).items()
    }


def test_aligned_corners_are_exported_by_their_sizes() -> None:
    """A scale of 1.5 makes 4 of 3, and ONNX would put the last corner at 4.5."""
    graph = Graph("g")
    op = Resize(sizes=(4,), scales=(1.5,), mode="linear", coordinates="align_corners")
    graph.set_outputs([graph.add(op, graph.add_input("x", TensorType((3,), DType.F32)))], ["y"])
    feeds = {"x": np.array([1.0, 5.0, -2.0], np.float32)}
    back = evaluate(frontends.load(to_onnx(graph).SerializeToString()), feeds)
    np.testing.assert_allclose(back["y"], evaluate(graph, feeds)["y"], rtol=1e-6)


def _resized(mode: str, sizes: tuple[int, ...], scales: tuple[float, ...]) -> Graph:
    graph = Graph("resized")
    x = graph.add_input("x", TensorType((1, 2, 3, 3), DType.F32))
    op = Resize(sizes=sizes, scales=scales, mode=mode, coordinates="half_pixel")
    graph.set_outputs([graph.add(op, x)], ["y"])
    return graph


@pytest.mark.parametrize(
    ("sizes", "scales", "nodes"),
    [
        ((1, 2, 4, 2), (1.0, 1.0, 4 / 3, 2 / 3), ["Resize"]),
        ((1, 2, 4, 4), (1.0, 1.0, 1.5, 1.5), ["Resize"]),
        ((1, 2, 4, 4), (1.0, 1.0, 1.5, 4 / 3), ["Resize", "Resize"]),  # 4/3 is no number of 32 bits: ties would differ
        ((1, 2, 5, 4), (1.0, 1.0, 1.5, 4 / 3), ["Resize", "Gather"]),  # rounded up
        ((1, 2, 4, 6), (1.0, 1.0, 1.4, 2.0), ["Resize", "Gather"]),
    ],
)
def test_resize_keeps_its_scales(sizes: tuple[int, ...], scales: tuple[float, ...], nodes: list[str]) -> None:
    graph = _resized("nearest", sizes, scales)
    model = to_onnx(graph)
    assert [n.op_type for n in model.graph.node] == nodes
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 2, 3, 3)).astype(np.float32)}
    back = evaluate(frontends.load(model.SerializeToString()), feeds)
    assert np.array_equal(back["y"], evaluate(graph, feeds)["y"])


def test_a_linear_resize_that_onnx_lacks_is_refused() -> None:
    with pytest.raises(LoweringError, match=r"ONNX has no Resize"):
        to_onnx(_resized("linear", (1, 2, 5, 3), (1.0, 1.0, 1.5, 1.0)))
