"""Define the request for values that only the host knows: the import of a node raises it, and the model is split there.

`fusec.frontends.onnx.segmented` makes a host step of each request. `Emitter` raises it (`emit.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusec.errors import VerifyError
from fusec.frontends.custom_ops import CustomOp
from fusec.frontends.onnx.emission.loop_body import LoopBody
from fusec.ir import Array, TensorType, Value, quote

Compute = Callable[[Sequence[Array]], Sequence[Array]]  # computes results on the host
# What the host gave to a node: the values that it asked for, or the types of what was computed there.
Answer = tuple[Array, ...] | tuple[TensorType, ...]


class HostValueError(VerifyError):
    """The import of a node needs values that are computed at run time.

    what: names the values in messages, with the inner node that needs them.
    values: those that the host must read.
    compute: computes results from them, which become inputs of the graph; None if the values decide shapes or branches.
    body: the body of a loop, whose results become inputs of the graph.
    custom: the user's function that `compute` calls.
    rows: a tensor on the device, of whose rows the value tells how many count. Those become an input of the graph.
    """

    def __init__(
        self,
        what: str,
        values: Sequence[Value],
        compute: Compute | None = None,
        body: LoopBody | None = None,
        custom: CustomOp | None = None,
        *,
        rows: Value | None = None,
    ):
        self.what, self.values, self.compute, self.body = what, tuple(values), compute, body
        self.custom, self.rows = custom, rows
        first = self.values if body is None else self.values[: body.operands[:2].count(None)]
        self.decisive = first or self.values  # a user who gives these needs no host step
        names = ", ".join(quote(v.name) for v in values)
        verb = "is" if len(values) == 1 else "are"
        super().__init__(f"{what} must be known at import, but {names} {verb} computed at run time")
