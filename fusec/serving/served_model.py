"""Describe a served model as the Open Inference Protocol does: names, datatypes and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from fusec.errors import FusecError
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from fusec.serving.predictor import Predictor  # a front end has no use for the compiler, which takes long to import

# Datatypes of version 2 of the protocol, except BYTES (strings), which no compiled model takes.
DATATYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"INT{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DATATYPES.items()}
ANY = -1  # a dim that may have several sizes


@dataclass(frozen=True)
class ServedTensor:
    """An input or output: -1 stands for a dim of several sizes. shape is None if only a run tells it."""

    name: str
    datatype: str
    shape: tuple[int, ...] | None

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the tensor, as the protocol writes it."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape or (ANY,))}


@dataclass(frozen=True)
class ServedModel:
    """A model that a worker process has loaded.

    max_batch: rows of the largest batch; 0 if requests are not joined.
    """

    name: str
    inputs: tuple[ServedTensor, ...]
    outputs: tuple[ServedTensor, ...]
    max_batch: int
    sizes: tuple[int, ...]

    def metadata(self) -> dict[str, Any]:
        """Return the model's metadata, as the protocol writes it."""
        tensors = {
            kind: [t.metadata() for t in of] for kind, of in (("inputs", self.inputs), ("outputs", self.outputs))
        }
        return {"name": self.name, "versions": ["1"], "platform": "fusec", **tensors}

    def config(self, delay_s: float) -> dict[str, Any]:
        """Return the configuration, in the form of Triton's extension of the protocol."""
        start = 1 if self.max_batch else 0

        def plain(tensors: Sequence[ServedTensor]) -> list[dict[str, Any]]:
            return [
                {"name": t.name, "data_type": triton_type(t.datatype), "dims": list((t.shape or (ANY,))[start:])}
                for t in tensors
            ]

        data: dict[str, Any] = {"name": self.name, "platform": "", "backend": "fusec", "max_batch_size": self.max_batch}
        data |= {"input": plain(self.inputs), "output": plain(self.outputs)}
        if self.max_batch:
            delay_us = round(delay_s * 1e6)
            data["dynamic_batching"] = {
                "preferred_batch_size": list(self.sizes),
                "max_queue_delay_microseconds": delay_us,
            }
        return data

    def to_json(self) -> dict[str, Any]:
        """Return plain data, which `from_json` reads."""
        tensors = {
            kind: [[t.name, t.datatype, t.shape] for t in of]
            for kind, of in (("inputs", self.inputs), ("outputs", self.outputs))
        }
        return {"name": self.name, "max_batch": self.max_batch, "sizes": list(self.sizes), **tensors}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ServedModel:
        """Read plain data that another process of this server wrote."""
        inputs, outputs = (
            tuple(ServedTensor(name, datatype, shape and tuple(shape)) for name, datatype, shape in data[kind])
            for kind in ("inputs", "outputs")
        )
        return cls(data["name"], inputs, outputs, data["max_batch"], tuple(data["sizes"]))


def describe(name: str, predictor: Predictor, sizes: Sequence[int]) -> ServedModel:
    """Describe a predictor. sizes: ascending batch sizes that a server forms; () if requests are not joined.

    Raises FusecError if a type has no name in the protocol.
    """
    inputs, outputs = (
        tuple(
            ServedTensor(
                spec.name,
                datatype_of(spec.dtype, f"{predictor.path}: {spec.name!r}"),
                None if spec.shape is None else tuple(d if isinstance(d, int) else ANY for d in spec.shape),
            )
            for spec in specs
        )
        for specs in (predictor.inputs, predictor.outputs)
    )
    return ServedModel(name, inputs, outputs, max(sizes, default=0), tuple(sizes))


def triton_type(datatype: str) -> str:
    """Return the name of a datatype in Triton's configuration."""
    return f"TYPE_{datatype}"


def datatype_of(dtype: np.dtype[Any] | None, what: str) -> str:
    """Return the protocol's name of a type. Raises FusecError if it has none."""
    if dtype is None or dtype not in _NAMES:
        raise FusecError(f"{what} is {dtype}, which the Open Inference Protocol has no name for")
    return _NAMES[dtype]
