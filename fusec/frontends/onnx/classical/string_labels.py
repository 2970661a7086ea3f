"""Number the classes of classifiers whose labels are strings, so that the device computes all but the labels.

Such a classifier becomes one with numbers as labels, and a LabelEncoder, which looks the labels up on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import AttributeProto, GraphProto, NodeProto, helper

# the attribute that has labels that are numbers, by op
_NUMBERS: Mapping[str, str] = {
    "LinearClassifier": "classlabels_ints",
    "SVMClassifier": "classlabels_ints",
    "TreeEnsembleClassifier": "classlabels_int64s",
}
_DOMAIN = "ai.onnx.ml"


def with_numbered_classes(graph: GraphProto) -> GraphProto:
    """Return a graph whose classifiers have numbers as labels: the graph itself, or a copy that is changed."""
    if not any(_labels(node) for node in graph.node):
        return graph
    changed = GraphProto()
    changed.CopyFrom(graph)
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken |= {value.name for value in (*graph.input, *graph.initializer)}
    del changed.node[:]
    for node in graph.node:
        labels = _labels(node)
        changed.node.extend(_numbered(node, labels, taken) if labels else [node])
    return changed


def _labels(node: NodeProto) -> list[bytes]:
    """Return the labels of a classifier that are strings; [] for other nodes."""
    if node.domain != _DOMAIN or node.op_type not in _NUMBERS:
        return []
    return next((list(each.strings) for each in node.attribute if each.name == "classlabels_strings"), [])


def _numbered(node: NodeProto, labels: list[bytes], taken: set[str]) -> list[NodeProto]:
    """Return a classifier with numbers as labels, and the node that translates them."""
    classifier = NodeProto()
    classifier.CopyFrom(node)
    others = [each for each in node.attribute if each.name not in ("classlabels_strings", _NUMBERS[node.op_type])]
    del classifier.attribute[:]
    classifier.attribute.extend(others)
    classifier.attribute.append(helper.make_attribute(_NUMBERS[node.op_type], range(len(labels))))
    label = node.output[0] if node.output else ""
    if not label:
        return [classifier]
    number = f"{label}/number"
    while number in taken:
        number += "'"
    taken.add(number)
    classifier.output[0] = number
    encoder = helper.make_node("LabelEncoder", [number], [label], name=f"{node.name}/labels", domain=_DOMAIN)
    encoder.attribute.append(helper.make_attribute("keys_int64s", range(len(labels))))
    encoder.attribute.append(AttributeProto(name="values_strings", type=AttributeProto.STRINGS, strings=labels))
    return [classifier, encoder]
