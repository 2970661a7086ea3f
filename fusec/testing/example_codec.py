"""Encode examples (a graph and a case) as text and arrays, in .npz files or JSON.

Large constants are stored apart from the graph's text. Every element type can be stored.
"""

from __future__ import annotations

import base64
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.lib.format import write_array

from fusec.ir import INLINE_ELEMENTS, Constant, DType, Graph, HostArray, Literal, print_graph
from fusec.testing.case import Case
from fusec.text import parse


def text_of(graph: Graph) -> tuple[str, dict[str, HostArray]]:
    """Print a graph, and collect by label the constants too large for the text.

    `parse(text, arrays)` restores the graph.
    """
    literals = [n.op.literal for n in graph.nodes if isinstance(n.op, Constant)]
    large = [literal for literal in literals if literal.type.size > INLINE_ELEMENTS]
    by_label = {literal.label: literal for literal in reversed(large)}
    if any(by_label[literal.label] is not literal for literal in large):  # two constants share a label
        return text_of(relabelled(graph))
    return print_graph(graph), {literal.label: literal.array for literal in large}


def relabelled(graph: Graph) -> Graph:
    """Label every constant by its value's name, as in a parsed graph.

    Returns the graph itself if all labels are already so, else a copy.
    """
    constants = [n for n in graph.nodes if isinstance(n.op, Constant)]
    if all(cast(Constant, n.op).literal.label == n.result.name for n in constants):
        return graph
    copy = graph.clone()
    for node in copy.nodes:
        if isinstance(node.op, Constant):
            copy.set_op(node, Constant(Literal.of(node.op.literal.array, node.result.name)))
    return copy


def save_npz(path: Path, arrays: Mapping[str, HostArray]) -> dict[str, str]:
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


def load_npz(path: Path, special: Mapping[str, str]) -> dict[str, HostArray]:
    """Read the arrays that `save_npz` wrote."""
    with np.load(path, allow_pickle=False) as archive:
        arrays: dict[str, HostArray] = {name: archive[name] for name in archive.files}
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


def _encode(array: HostArray) -> list[Any]:
    contiguous = np.ascontiguousarray(array)
    return [DType.of(array.dtype).value, list(array.shape), base64.b64encode(contiguous.tobytes()).decode()]


def _decode(packed: list[Any]) -> HostArray:
    dtype, shape, data = packed
    return np.frombuffer(base64.b64decode(data), DType(dtype).numpy).reshape(shape).copy()
