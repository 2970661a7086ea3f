"""Encode examples (a graph and a case) as text and arrays, in .npz files or JSON.

Large constants are stored apart from the graph's text. Every element type can be stored.
"""

from __future__ import annotations

import base64
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import write_array

from fusec.ir import INLINE_ELEMENTS, Constant, DType, Graph, Literal, print_graph
from fusec.testing.case import Case
from fusec.text import parse

Array = np.ndarray[Any, Any]


def text_of(graph: Graph) -> tuple[str, dict[str, Array]]:
    """Print a graph, and collect by label the constants too large for the text.

    `parse(text, arrays)` restores the graph.
    """
    large = [(n, n.op.literal) for n in graph.nodes if isinstance(n.op, Constant)]
    large = [(n, literal) for n, literal in large if literal.type.size > INLINE_ELEMENTS]
    literals: dict[str, Literal] = {}
    if any(literals.setdefault(literal.label, literal) is not literal for _, literal in large):
        graph = graph.clone()  # because two constants share a label: label each by its value's name
        for node in graph.nodes:
            if isinstance(node.op, Constant):
                graph.set_op(node, Constant(Literal.of(node.op.literal.array, node.result.name)))
        return text_of(graph)
    return print_graph(graph), {label: literal.array for label, literal in literals.items()}


def save_npz(path: Path, arrays: Mapping[str, Array]) -> dict[str, str]:
    """Write arrays by name to an .npz file.

    Returns the element types that .npz cannot store, by array name. Such arrays are stored as integers of
    the same width.
    """
    special: dict[str, str] = {}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            stored = np.ascontiguousarray(array)
            if stored.dtype.kind == "V":  # types that ml_dtypes adds to NumPy
                special[name] = DType.of(stored.dtype).value
                stored = stored.view(f"u{stored.dtype.itemsize}")
            with archive.open(f"{name}.npy", "w") as member:
                write_array(member, stored.reshape(np.shape(array)), allow_pickle=False)
    return special


def load_npz(path: Path, special: Mapping[str, str]) -> dict[str, Array]:
    """Read the arrays that `save_npz` wrote."""
    with np.load(path, allow_pickle=False) as archive:
        arrays: dict[str, Array] = {name: archive[name] for name in archive.files}
    return {
        name: array.view(DType(special[name]).numpy) if name in special else array for name, array in arrays.items()
    }


def encode(graph: Graph, case: Case) -> dict[str, Any]:
    """Encode an example as JSON data."""
    text, weights = text_of(graph)
    feeds = None if case.feeds is None else {name: _encode(array) for name, array in case.feeds.items()}
    packed = {label: _encode(array) for label, array in weights.items()}
    return {"text": text, "weights": packed, "case": case.to_json(), "feeds": feeds}


def decode(data: Mapping[str, Any]) -> tuple[Graph, Case]:
    """Decode an example from the data of `encode`."""
    graph = parse(data["text"], {label: _decode(packed) for label, packed in data["weights"].items()})
    feeds = data["feeds"]
    arrays = None if feeds is None else {name: _decode(packed) for name, packed in feeds.items()}
    return graph, Case.from_json(data["case"], arrays)


def _encode(array: Array) -> list[Any]:
    contiguous = np.ascontiguousarray(array)
    return [DType.of(array.dtype).value, list(array.shape), base64.b64encode(contiguous.tobytes()).decode()]


def _decode(packed: list[Any]) -> Array:
    dtype, shape, data = packed
    return np.frombuffer(base64.b64decode(data), DType(dtype).numpy).reshape(shape).copy()
