"""Describe a graph of the cuDNN frontend as plain, frozen data.

`lower_cudnn` makes it, `gpu/cudnn/plans/emit.py` replays it on `cudnn.pygraph`, and `simulator` runs it in NumPy.
It has no names of the model, so that equal steps have equal graphs and share verdicts and plans in the caches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from typing import Any

from fusec.ir import DType
from fusec.system.dataclass import dataclass

CONVOLUTIONS = ("conv_fprop", "conv_dgrad")  # calls that compute an image from an image and filters

Attribute = int | float | bool | str | tuple[int, ...]


@dataclass(frozen=True)
class CudnnTensor:
    """A tensor of the graph; strides in elements.

    virtual: the tensor never reaches memory. Its `dtype` is fp32, unless it must be rounded: the result of a prologue
        has the type of the operand.
    value: a number that is passed by value; all dims are then 1.
    """

    uid: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    virtual: bool = False
    value: float | None = None


@dataclass(frozen=True)
class CudnnCall:
    """One operation: operand and result uids, in the order that PORTS fixes for `op`."""

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mode: str = ""  # pointwise and reduction mode, in the frontend's lower-case spelling
    attributes: tuple[tuple[str, Attribute], ...] = ()
    compute: DType = DType.F32

    def attribute(self, name: str, default: Any = None) -> Any:
        return dict(self.attributes).get(name, default)


# For each op: input ports, output ports and attributes. Attributes that are tuples have one entry per spatial dim.
PORTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    # flipped, where true: the filters are reversed along each spatial dim (cuDNN's mode CONVOLUTION)
    "conv_fprop": (("image", "weight"), ("y",), ("pre_padding", "post_padding", "stride", "dilation", "flipped")),
    # the loss is dy, the input of a transposed convolution; the dims of y are given on the tensor
    "conv_dgrad": (("loss", "filter"), ("y",), ("pre_padding", "post_padding", "stride", "dilation")),
    # y is the gradient of the filters, whose dims are given on the tensor
    "conv_wgrad": (("image", "loss"), ("y",), ("pre_padding", "post_padding", "stride", "dilation")),
    "matmul": (("a", "b"), ("c",), ("fast_sums",)),  # fast_sums: for cuBLASLt, where true; cuDNN has no such choice
    # one to three inputs and the attributes, as the frontend's method takes them
    "pointwise": (("a", "b", "c"), ("y",), ("negative_slope", "lower_clip", "upper_clip", "alpha", "beta", "axis")),
    "sdpa": (("q", "k", "v", "bias"), ("o",), ("attn_scale", "use_causal_mask")),  # bias may be left out
    # stats: logarithms of the sums of exponentials, of each row of scores
    "sdpa_train": (("q", "k", "v", "bias"), ("o", "stats"), ("attn_scale", "use_causal_mask")),
    "sdpa_backward": (
        ("dO", "q", "k", "v", "o", "stats", "bias"),
        ("dq", "dk", "dv"),
        ("attn_scale", "use_causal_mask", "use_deterministic_algorithm"),
    ),
    "genstats": (("x",), ("sum", "squares"), ()),  # of each channel
    "reduction": (("x",), ("y",), ()),  # mode: add, mul, min, max, amax
    "layernorm": (("x", "scale", "bias", "epsilon"), ("y",), ()),  # epsilon: by value
    "rmsnorm": (("x", "scale", "bias", "epsilon"), ("y",), ()),  # bias may be left out: 3 inputs
    "instancenorm": (("x", "scale", "bias", "epsilon"), ("y",), ()),
    # in training; epsilon and momentum: by value. Next statistics: (1 - momentum) * before + momentum * those of x, the
    # variance of which is divided by one less than the elements of a channel
    "batchnorm": (
        ("x", "scale", "bias", "in_running_mean", "in_running_var", "epsilon", "momentum"),
        ("y", "mean", "inv_variance", "next_running_mean", "next_running_var"),
        (),
    ),
    "batchnorm_backward": (("dy", "x", "scale", "mean", "inv_variance"), ("dx", "dscale", "dbias"), ()),
}


@dataclass(frozen=True)
class CudnnGraph:
    """Tensors by ascending uid (from 1), and calls in topological order.

    tensor_cores: False excludes plans that round fp32 operands to tf32 (those with the numeric note TENSOR_CORE).
    """

    tensors: tuple[CudnnTensor, ...]
    calls: tuple[CudnnCall, ...]
    tensor_cores: bool = True

    def tensor(self, uid: int) -> CudnnTensor:
        return self._by_uid[uid]

    def sources(self, uid: int) -> set[int]:
        """Find the tensors in memory from which a tensor is computed; a scalar passed by value has none."""
        makers = [call for call in self.calls if uid in call.outputs]
        if not makers:
            return {uid} if self.tensor(uid).value is None else set()
        return {source for call in makers for each in call.inputs for source in self.sources(each)}

    @cached_property
    def _by_uid(self) -> dict[int, CudnnTensor]:
        return {t.uid: t for t in self.tensors}

    @property
    def inputs(self) -> tuple[CudnnTensor, ...]:
        """List the stored tensors that no call computes, without numbers passed by value."""
        made = {uid for call in self.calls for uid in call.outputs}
        return tuple(t for t in self.tensors if t.uid not in made and t.value is None)

    @property
    def outputs(self) -> tuple[CudnnTensor, ...]:
        """List the stored tensors that a call computes."""
        made = {uid for call in self.calls for uid in call.outputs}
        return tuple(t for t in self.tensors if t.uid in made and not t.virtual)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `from_json` reads an equal graph from it. Floats are text, so that infinities survive."""
        tensors = [
            {**vars(t), "dtype": t.dtype.value, "value": None if t.value is None else repr(t.value)}
            for t in self.tensors
        ]
        calls = [
            {
                **vars(c),
                "attributes": {k: repr(v) if isinstance(v, float) else v for k, v in c.attributes},
                "floats": [k for k, v in c.attributes if isinstance(v, float)],
                "compute": c.compute.value,
            }
            for c in self.calls
        ]
        return {"tensor_cores": self.tensor_cores, "tensors": tensors, "calls": calls}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CudnnGraph:
        """Read what `to_json` returned, also after it was written as JSON."""
        tensors = tuple(
            CudnnTensor(
                t["uid"],
                tuple(t["dims"]),
                tuple(t["strides"]),
                DType(t["dtype"]),
                t["virtual"],
                None if t["value"] is None else float(t["value"]),
            )
            for t in data["tensors"]
        )
        calls = tuple(
            CudnnCall(
                c["op"],
                tuple(c["inputs"]),
                tuple(c["outputs"]),
                c["mode"],
                tuple(
                    (k, float(v) if k in c["floats"] else tuple(v) if isinstance(v, list) else v)
                    for k, v in c["attributes"].items()
                ),
                DType(c["compute"]),
            )
            for c in data["calls"]
        )
        return cls(tensors, calls, data["tensor_cores"])

    @property
    def blocks_meet(self) -> bool:
        """Tell if the blocks of a plan wait for each other: batch norms in training keep their image on the chip."""
        return any(call.op in ("batchnorm", "batchnorm_backward") for call in self.calls)

    @cached_property
    def key(self) -> str:
        """Return the SHA-256 of the graph as JSON with sorted keys."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @cached_property
    def size_free_key(self) -> Hashable:
        """Return a key that graphs of other sizes share: it has no dims above 1, nor strides that follow from them."""
        tensors: list[Hashable] = []
        for t in self.tensors:
            order = sorted(range(len(t.dims)), key=lambda i: (-t.strides[i], i))
            wide = tuple(i for i in order if t.dims[i] != 1)
            tensors.append((t.uid, tuple(min(d, 2) for d in t.dims), wide, t.dtype, t.virtual, repr(t.value)))
        return (tuple(tensors), self.calls, self.tensor_cores)

    @cached_property
    def number_free_key(self) -> Hashable:
        """Return a key that graphs with other numbers by value share: cuDNN gets these when a plan runs."""
        tensors = tuple(t if t.value is None else replace(t, value=0.0) for t in self.tensors)
        return (tensors, self.calls, self.tensor_cores)

    def __str__(self) -> str:
        """Print a line for each call: `#3:f16[8,64,28,28](50176,1,1792,64) = conv_fprop(#1:…, #2:…) stride=[1, 1]`."""

        def show(uid: int) -> str:
            t = self.tensor(uid)
            if t.value is not None:
                return f"{t.value!r}:{t.dtype.value}"
            mark = "~" if t.virtual else ""
            dims, strides = ",".join(map(str, t.dims)), ",".join(map(str, t.strides))
            return f"{mark}#{uid}:{t.dtype.value}[{dims}]({strides})"

        lines: list[str] = []
        for call in self.calls:
            attributes = "".join(f" {k}={list(v) if isinstance(v, tuple) else v}" for k, v in call.attributes)
            mode = f".{call.mode}" if call.mode else ""
            compute = "" if call.compute is DType.F32 else f" compute={call.compute.value}"
            left = ", ".join(map(show, call.outputs))
            lines.append(f"{left} = {call.op}{mode}({', '.join(map(show, call.inputs))}){attributes}{compute}")
        return "\n".join([*lines, *([] if self.tensor_cores else ["no tensor cores"])])
