"""Generate attention of one query over a cache, with the rows that the same step writes into the cache.

A decode step writes the keys and values of a token into its cache, often after rotary embeddings. Then it attends to
all of the cache. Each block has a part of the keys of one sequence. It requests them while the launch before it still
runs, because earlier calls wrote them. Then it embeds its queries, puts new rows in their places, and multiplies on
tensor cores. The blocks of a sequence add up their parts in a cluster, or the last one to finish does.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.attention.cached_source import CachedAttentionSource
from fusec.gpu.kernels.attention.match_cached import match_cached_attention
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Kernel, with_variants
from fusec.ir import Node, Value

# Warps and keys of a block, and whether the blocks of a sequence are a cluster.
TILINGS = (
    (4, 128, False),
    (4, 64, False),
    (8, 128, False),
    (8, 256, False),
    (4, 128, True),
    (4, 256, True),
    (8, 256, True),
)


def cached_attention(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of such an attention; None for other steps."""
    found = match_cached_attention(nodes, outputs)
    if found is None:
        return None
    sources = [CachedAttentionSource(found, *tiling) for tiling in TILINGS]
    fit = [each for each in sources if each.shared_bytes <= figures.dynamic_bytes and each.may_cluster(figures)]
    return with_variants(source.kernel() for source in sorted(fit, key=lambda s: s.blocks < figures.processors // 2))
