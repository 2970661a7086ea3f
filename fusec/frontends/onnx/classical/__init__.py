"""Import the ops of ai.onnx.ml that compute with numbers, as converters of scikit-learn write them."""

from __future__ import annotations

from collections.abc import Mapping

from fusec.frontends.onnx.classical import features, labels, linear, support_vectors, tree_ensemble, trees
from fusec.frontends.onnx.emission.emit import OpFunction

TABLE: Mapping[str, OpFunction] = {
    **features.TABLE,
    **labels.TABLE,
    **linear.TABLE,
    **support_vectors.TABLE,
    **trees.TABLE,
    **tree_ensemble.TABLE,
}
