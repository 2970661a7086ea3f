"""Say why an op is refused, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusec.errors import ModelError

_OLD = "onnx.version_converter writes it as a newer op"
_OPS: Mapping[tuple[str, str], str] = {  # by domain and op
    **{("", op): _OLD for op in ("Scatter", "Upsample")},
    ("ai.onnx.ml", "TreeEnsemble"): "version 5 of ai.onnx.ml defines it: let the model import that version",
    ("ai.onnx.preview.training", "Gradient"): (
        "fusec makes gradients of graphs itself: remove this node, and call fusec.grad (docs/training.md)"
    ),
}
_DOMAINS: Mapping[str, str] = {
    "ai.onnx.ml": "of classical models, fusec runs what computes with numbers: run this one in onnxruntime",
    "com.microsoft.nchwc": "onnxruntime writes it for one kind of CPU: optimise with ORT_ENABLE_EXTENDED instead",
}
_UNKNOWN = (
    "fusec does not know what it computes: export ONNX ops, define it as a function of the model, or give a Python "
    "function for it (custom_ops, docs/custom-ops.md)"
)


def advice(domain: str, op: str) -> str:
    """Return the reason for refusing an op and the remedy; empty if there is nothing to add. domain: "" for ONNX's."""
    if (domain, op) in _OPS:
        return _OPS[domain, op]
    return "" if not domain else _DOMAINS.get(domain, _UNKNOWN)


def require_tensors(file: str, sequences: Iterable[str]) -> None:
    """Raise ModelError, with the remedy, for an output that is a sequence of tensors.

    sequences: the names of the outputs that are sequences.
    """
    for name in sequences:
        raise ModelError(
            f"{file}: output {name!r} is a sequence of tensors, not a tensor: add a SequenceAt node for each tensor to "
            "the model, and make their results its outputs"
        )


NO_HOST_STEPS = (
    "one graph has no host steps: fusec.compile runs the model as several programs (docs/host-steps.md). If inputs of "
    "the model decide the values, constants={'name': value} or --constant name=value makes one graph"
)
