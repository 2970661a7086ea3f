"""Edge values: every op that cuDNN or a kernel runs has rows of them, and gives for them what it means."""

from __future__ import annotations

from gpu.edges import forms
from gpu.edges.table import table

from fusec.gpu.kernels import FAMILIES
from fusec.lower_cudnn import LOWER
from fusec.ops import BY_NAME


def test_every_op_has_rows() -> None:
    assert {row.op for row in table().values()} == set(BY_NAME)


def test_every_op_that_is_lowered_is_lowered_in_a_row() -> None:
    lowered = {n.op.name for row in table().values() if any(True for _ in forms.lowered(row)) for n in row.nodes}
    assert lowered >= set(LOWER)


def test_every_family_of_kernels_has_a_row() -> None:
    steps = [(row.nodes, row.outputs) for row in table().values() if not row.whole]
    without = [f.__name__ for f in FAMILIES if not any(f(nodes, outputs) is not None for nodes, outputs in steps)]
    assert not without
