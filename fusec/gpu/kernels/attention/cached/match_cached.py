"""Recognise attention of one query over a cache that the same step writes rows into.

Decoders of all kinds have this form: rows of keys and values are scattered into tensors of
[sequences * keys, features], and attention reads views of the results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, View, source
from fusec.ir import HALVES, Node, TensorType, Value
from fusec.ops import Attention, Rotary, Scatter
from fusec.schedule.aliasing import is_view
from fusec.schedule.program import outputs_of
from fusec.schedule.row_writes import RowWrite, match_row_writes
from fusec.system.dataclass import dataclass

PACK = 8  # elements that are read at a time
TILE = 16  # features in a product on tensor cores
MAX_FEATURES = 256
MAX_SHARERS = 32  # heads that share keys and values
MAX_ELEMENTS = 1 << 31  # of a cache


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """An attention, and the writes into its cache.

    nodes: all of the step.
    writes: the nodes that write keys, and values.
    written: the value that each write stores; None if nothing else reads the cache.
    query, query_view: the value whose memory holds the queries, and their view of it.
    """

    nodes: tuple[Node, ...]
    attention: Node
    writes: tuple[RowWrite, RowWrite]
    written: tuple[Value | None, Value | None]
    query: Value
    query_view: View

    @property
    def op(self) -> Attention:
        assert isinstance(self.attention.op, Attention)
        return self.attention.op

    @property
    def indices(self) -> Value:
        """The numbers of the new rows."""
        return self.writes[0].scatter.operands[1]

    @property
    def bias(self) -> Value | None:
        """The tensor that is added to scores."""
        return self.attention.operands[3] if len(self.attention.operands) > 3 else None

    @property
    def groups(self) -> int:
        """The heads of keys and values."""
        return self.attention.operands[1].type.shape[1]

    @property
    def sharers(self) -> int:
        """The heads of queries that share keys and values."""
        return self.attention.operands[0].type.shape[1] // self.groups

    @property
    def sequences(self) -> int:
        """The heads of keys and values of all images."""
        return self.attention.operands[1].type.shape[0] * self.groups

    @property
    def keys(self) -> int:
        return self.attention.operands[1].type.shape[2]

    @property
    def features(self) -> int:
        return self.attention.operands[1].type.shape[3]

    @property
    def query_embedding(self) -> Node | None:
        """The rotary embedding that computes the queries, if it is of this step."""
        return self.query.node if self.query.node in self.nodes else None

    @property
    def embeddings(self) -> list[tuple[Node, int]]:
        """The rotary embeddings, each with a divisor of the places in its result where rows begin."""
        found = [(w.rotary, w.start) for w in self.writes if w.rotary is not None]
        return found if self.query_embedding is None else [*found, (self.query_embedding, self.query_view.start)]

    @property
    def is_constant(self) -> bool:
        """Tell if no launch of the program before this one may write into the cache.

        The cache is an input, and another launch computes the queries. Thus at least that launch lies between this one
        and whatever wrote the cache, and dependent launches wait before they let the next one begin.
        """
        from_outside = [
            v for node in self.nodes for v in node.operands if v.literal is None and v.node not in self.nodes
        ]
        caches = [write.scatter.operands[0] for write in self.writes]
        computed = [v for v in from_outside if v not in caches and _root(v).node is not None]
        return all(_root(cache).node is None for cache in caches) and bool(computed)


def match_cached_attention(nodes: Sequence[Node], outputs: Sequence[Value]) -> CachedAttention | None:
    """Return the attention of a step, with its writes; None for other steps."""
    attention = next((node for node in nodes if isinstance(node.op, Attention)), None)
    writing = writing_nodes(nodes)
    if attention is None or not writing or not _is_supported(attention):
        return None
    views = [node for node in nodes if node is not attention and node not in writing]
    writes = match_row_writes(writing)
    if writes is None or len(writes) != 2 or not all(isinstance(node.op, VIEW_OPS) for node in views):
        return None
    q, k, v, *bias = attention.operands
    if any(value.node in nodes for value in bias) or any(attention.result in node.operands for node in nodes):
        return None
    if any(value.node in nodes for write in writes for value in write.reads):
        return None
    moving = [*views, *(node for node in writing if isinstance(node.op, VIEW_OPS))]
    keys, values, query = _cached(k, writes, moving), _cached(v, writes, moving), source(q, moving)
    if keys is None or values is None or keys is values or query is None or not _has_packs(*query):
        return None
    if query[0].node is not None and query[0].node in nodes and not isinstance(query[0].node.op, Rotary):
        return None
    written = [[o for o in outputs if _cached(o, [write], moving) is not None] for write in (keys, values)]
    if any(len(each) > 1 for each in written) or len(outputs) != 1 + sum(map(len, written)):
        return None
    if attention.result not in outputs:
        return None
    stored = [each[0] if each else None for each in written]
    return CachedAttention(tuple(nodes), attention, (keys, values), (stored[0], stored[1]), *query)


def writing_nodes(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes that write rows, with the embeddings of the step and the views between them."""
    found: set[Node] = {node for node in nodes if isinstance(node.op, Rotary)}
    for scatter in (node for node in nodes if isinstance(node.op, Scatter)):
        found.add(scatter)
        value, views = scatter.operands[2], list[Node]()
        while value.node is not None and value.node in nodes and isinstance(value.node.op, VIEW_OPS):
            views.append(value.node)
            value = value.node.operands[0]
        if value.node in found:
            found.update(views)
    return tuple(node for node in nodes if node in found)


def parts_of_cached(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], tuple[Node, ...], tuple[Node, ...]]:
    """Return the nodes that write rows, the views of their results, and the attention, which can run one by one."""
    writing = writing_nodes(nodes)
    attention = tuple(node for node in nodes if isinstance(node.op, Attention))
    return writing, tuple(node for node in nodes if node not in (*writing, *attention)), attention


def begins_cached_attention(nodes: Sequence[Node]) -> bool:
    """Tell if steps that begin with these nodes may become such an attention: writes, views and one attention."""
    writing = writing_nodes(nodes)
    writes = match_row_writes(writing) if writing else None
    if writes is None or len(writes) != 2:
        return False
    rest = [node for node in nodes if node not in writing]
    attentions = [node for node in rest if isinstance(node.op, Attention)]
    results = [node.result for node in attentions]
    others = [node for node in rest if node not in attentions]
    return (
        len(attentions) <= 1
        and all(isinstance(node.op, VIEW_OPS) for node in others)
        and not any(v in results for node in nodes for v in node.operands)
    )


def is_cached_attention(nodes: Sequence[Node]) -> bool:
    """Tell if a step is such an attention."""
    return any(isinstance(node.op, Attention) for node in nodes) and (
        match_cached_attention(nodes, outputs_of(nodes)) is not None
    )


def _is_supported(node: Node) -> bool:
    op, (q, k, v), y = node.op, (operand.type for operand in node.operands[:3]), node.result.type
    assert isinstance(op, Attention)
    if op.causal or op.guarded or q.shape[2] != 1 or not y.size or len({t.dtype for t in (q, k, v, y)}) > 1:
        return False
    if any(t.dtype.is_narrow or not t.dtype.is_float for t in (operand.type for operand in node.operands[3:])):
        return False
    if q.dtype not in HALVES or v.shape[3] != q.shape[3] or q.shape[3] % TILE or q.shape[3] > MAX_FEATURES:
        return False
    packed = y.strides[3] == 1 and all(
        s % PACK == 0 for s, size in zip(y.strides[:3], y.shape, strict=False) if size > 1
    )
    return packed and y.span < MAX_ELEMENTS and k.size < MAX_ELEMENTS and q.shape[1] // k.shape[1] <= MAX_SHARERS


def _cached(value: Value, writes: Sequence[RowWrite], views: Collection[Node]) -> RowWrite | None:
    """Return the write whose result a value is, in the order of memory; None if it is another value."""
    found = source(value, list(views))
    if found is None:
        return None
    write = next((write for write in writes if write.scatter.result is found[0]), None)
    rows, features = found[0].type.shape[:1], value.type.shape[-1:]
    packed = View.of(TensorType(value.type.shape, value.type.dtype))
    if write is None or found[1] != packed or found[0].type.shape != (*rows, *features):
        return None
    return write


def _has_packs(value: Value, view: View) -> bool:
    """Tell if queries are rows that packs divide, at places of 32 bits."""
    moved = [stride for stride, size in zip(view.strides[:3], view.shape, strict=False) if size > 1]
    is_row = view.strides[3] == 1 and not any(s % PACK or s < 0 for s in (*moved, view.start))
    return is_row and value.type.span < MAX_ELEMENTS


def _root(value: Value) -> Value:
    """Return the value in whose memory this is, so that no launch copies it."""
    while value.node is not None and is_view(value.node):
        value = value.node.operands[0]
    return value
