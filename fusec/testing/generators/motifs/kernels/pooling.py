"""Draw steps for the kernels of pools, their gradients, and regions of images."""

from __future__ import annotations

from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.kernels.parts import image_input, image_side, op_with_epilogue
from fusec.testing.generators.motifs.layers import epilogue
from fusec.testing.generators.operations import DRAWS


def pool_forward(b: RandomGraph) -> None:
    """Draw a pool over an image of any layout, with pointwise ops after it."""
    op_with_epilogue(
        b, image_input(b, b.pick([8, 3, 16, 4]), image_side(b), image_side(b)), b.pick(["max_pool", "avg_pool"])
    )


def max_pool_backward(b: RandomGraph) -> None:
    """Draw the gradient of a max pool, or of one that stores its places, with pointwise ops after it."""
    DRAWS[b.pick(["max_pool_backward", "max_pool_train"])](b)
    epilogue(b, b.values[-1], 2)


def roi_align(b: RandomGraph) -> None:
    """Draw the regions of an image, with pointwise ops after them."""
    op_with_epilogue(
        b, image_input(b, b.pick([4, 8, 3]), image_side(b), image_side(b)), b.pick(["roi_align", "roi_pool"])
    )
