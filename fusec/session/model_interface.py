"""Describe inputs, outputs and metadata of a model as onnxruntime does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusec.ir import DType
from fusec.session.ort_value import type_name
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class NodeArg:
    """An input or output of a session.

    shape: a symbolic dim is its name, or None if it has no name.
    type: as onnxruntime writes it, such as `tensor(float)`.
    """

    name: str
    shape: list[int | str | None]
    type: str

    @classmethod
    def of(cls, name: str, shape: Sequence[int | str] | None, dtype: np.dtype[Any] | None) -> NodeArg:
        """Describe an input or output; shape and dtype are None if the model declares none."""
        type = "tensor(undefined)" if dtype is None else type_name(DType.of_host(dtype))
        return cls(name, [d if d != "" else None for d in shape or ()], type)


@dataclass(frozen=True)
class ModelMeta:
    """Metadata of the model file."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]
