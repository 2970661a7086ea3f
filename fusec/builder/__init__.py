"""Build graphs from Python: `Builder` adds ops, `Tensor` has the operators. Walk-through: docs/training.md."""

from fusec.builder.builder import Builder
from fusec.builder.tensor import Tensor

__all__ = ["Builder", "Tensor"]
