"""Generate attention of one query over a cache, with the rows that the same step writes into the cache.

A decode step writes the keys and values of a token into its cache, often after rotary embeddings. Then it attends to
all of the cache. Each block has a part of the keys of one sequence. It requests them while the launch before it still
runs, because earlier calls wrote them. Then it embeds its queries, puts new rows in their places, and multiplies on
tensor cores. The blocks of a sequence add up their parts in a cluster, or the last one to finish does.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.attention.cached.cached_source import CachedAttentionSource
from fusec.gpu.kernels.attention.cached.match_cached import match_cached_attention
from fusec.gpu.kernels.attention.cached.streamed.streamed_attention import KEYS, TILINGS, StreamedAttentionSource
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import CLUSTERS, Kernel, with_variants
from fusec.ir import Node, Value

# Warps and keys of a block, and whether the blocks of a sequence are a cluster.
CLUSTERED = ((8, 256, True), (4, 256, True))
PLAIN = ((4, 128, False), (4, 64, False), (8, 128, False))


def cached_attention(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of such an attention; None for other steps, and for caches of too many clusters.

    All blocks have to run together. The kernel gains by what it does before the launch before it ends, which only the
    first blocks can do. Where launches are dependent, parts that the last block adds up are not offered: timed alone
    they are as fast as clusters, but within a decode step they were slower on an H200.
    """
    found = match_cached_attention(nodes, outputs)
    if found is None:
        return None
    tilings = CLUSTERED if figures.has(CLUSTERS) else PLAIN
    sources = [CachedAttentionSource(found, *tiling) for tiling in tilings]
    kernels = [source.kernel(figures) for source in sources if source.may_cluster and _fits(source, figures)]
    streams = [StreamedAttentionSource(found, warps, stages * KEYS, False) for warps, stages in TILINGS]
    return with_variants([*kernels, *(source.kernel(figures) for source in streams if source.fits(figures))])


def _fits(source: CachedAttentionSource, figures: GpuFigures) -> bool:
    """Return True if all blocks of a launch have room on the GPU together."""
    of_one = figures.dynamic_bytes // source.shared_bytes  # blocks of a multiprocessor
    return source.blocks <= of_one * figures.processors
