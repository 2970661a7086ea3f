"""Models whose inputs, outputs, weights and steps are of 8 bits and fewer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from gpu.kernels.elementwise.test_narrow_types import every_code

from fusec import text
from fusec.ir import DType, Graph

DTYPES = (DType.F8E4M3, DType.F8E5M2, DType.I4, DType.U4, DType.F4E2M1, DType.I2)

# An embedding whose table stays packed, because its rows are known at run time only.
EMBEDDING = """graph "embedding" (%i: i64[5], %s: f32[5,1]) {{
  %t = constant weight("t") : {0}[9,33]
  %r = gather(%t, %i) {{axis=0}}
  %c = cast(%r) {{to=f32}}
  %y = mul(%c, %s)
  return %y
}}"""
# What comes in packed goes out packed, moved by copies and by views; and as other types.
MOVES = """graph "moves" (%q: {0}[4,37], %x: f32[4,36]) {{
  %a, %b = split(%q) {{axis=1, sizes=[1,36]}}
  %t = transpose(%b) {{perm=[1,0]}}
  %n = cast(%x) {{to={0}}}
  %j = concat(%n, %a, %b) {{axis=1}}
  %v = reshape(%j) {{shape=[2,146]}}
  %c = cast(%q) {{to=f16}}
  %d = cast(%b) {{to=f32}}
  %y = add(%d, %x)
  %first = slice(%q) {{starts=[0,0], sizes=[2,37], steps=[1,1]}}
  return %t, %v, %c, %y, %first
}}"""


def embedding(dtype: DType) -> tuple[Graph, dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    graph = text.parse(EMBEDDING.format(dtype.value), {"t": every_code(dtype, (9, 33))})
    return graph, {"i": rng.integers(-9, 9, 5), "s": rng.standard_normal((5, 1)).astype(np.float32)}


def moves(dtype: DType) -> tuple[Graph, dict[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    graph = text.parse(MOVES.format(dtype.value), {})
    low = 0 if dtype is DType.U4 else -2
    return graph, {"q": every_code(dtype, (4, 37)), "x": rng.integers(low, 2, (4, 36)).astype(np.float32)}


GRAPHS = {"embedding": embedding, "moves": moves}


def assert_equal(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    """Compare bit by bit, except that all NaN are equal."""
    for name, wanted in want.items():
        assert got[name].dtype == wanted.dtype, name
        assert got[name].shape == wanted.shape, name
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(
                got[name].astype(np.float32), np.asarray(wanted).astype(np.float32), err_msg=name
            )
