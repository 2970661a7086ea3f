"""Run torch models: `torch.compile(model, backend="fusec")` and `fusec.from_torch(exported_program)`.

torch itself runs a graph that fusec does not support, after one warning with the reason.
"""

from __future__ import annotations

from fusec.torch_backend.dynamo import backend
from fusec.torch_backend.exported_program import TorchExecutable, from_torch
from fusec.torch_backend.graph_report import TorchReport, explain

__all__ = ["TorchExecutable", "TorchReport", "backend", "explain", "from_torch"]
