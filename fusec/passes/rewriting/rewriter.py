"""Apply rules all over a graph: sweeps in graph order until nothing matches, linear in the graph's size.

Rules are indexed by the ops of their roots. A rewrite erases unused nodes immediately, and the replacement takes over
their origin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

from fusec.errors import VerifyError
from fusec.ir import Constant, Graph, Node, Op, Value
from fusec.system.dataclass import dataclass

MAX_SWEEPS = 8  # most rewrites enable others downstream, in the same sweep; the reverse is rare


class NoMatch(Exception):  # noqa: N818 - no error: the usual outcome
    """The reason why a rule does not apply, and the value that prevents it."""

    def __init__(self, reason: str, value: Value | None = None):
        super().__init__(reason)
        self.reason = reason
        self.value = value


class Rewriter(Protocol):
    """Protocol of rules: the ops a rule may start from, and the replacement."""

    @property
    def name(self) -> str: ...

    @property
    def equation(self) -> str:
        """Return the equation, for people."""
        ...

    @property
    def roots(self) -> frozenset[str]:
        """Return the names of ops that a match ends in."""
        ...

    def apply(self, graph: Graph, node: Node) -> Value | None:
        """Return the value to use for `node.result` instead (new nodes inserted before `node`), or None.

        NoMatch means None, with a reason.
        """
        ...


@dataclass(frozen=True)
class Local:
    """A rule written by hand, for rewrites that a pattern cannot express."""

    name: str
    equation: str
    roots: frozenset[str]
    function: Callable[[Graph, Node], Value | None]

    def apply(self, graph: Graph, node: Node) -> Value | None:
        return self.function(graph, node)


def local(*roots: str, equation: str) -> Callable[[Callable[[Graph, Node], Value | None]], Local]:
    """Make a rule of a function from graph and root node to the new value (or None)."""

    def decorate(function: Callable[[Graph, Node], Value | None]) -> Local:
        return Local(function.__name__.strip("_"), equation, frozenset(roots), function)

    return decorate


def on_copy(change: Callable[[Graph], None]) -> Callable[[Graph], Graph | None]:
    """Make a function that changes a copy of a graph, and returns None if `change` raises NoMatch."""

    @functools.wraps(change)
    def changed(graph: Graph) -> Graph | None:
        copy = graph.clone()
        try:
            change(copy)
        except NoMatch:
            return None
        copy.prune()
        return copy

    return changed


def rewrite(graph: Graph, rules: Sequence[Rewriter], disable: Collection[str] = ()) -> dict[str, int]:
    """Apply the rules (earlier ones first at a node) until none matches; return how often each did."""
    index: dict[str, list[Rewriter]] = {}
    for rule in rules:
        for root in rule.roots if rule.name not in disable else ():
            index.setdefault(root, []).append(rule)
    fired: dict[str, int] = {}
    for _ in range(MAX_SWEEPS):
        before = sum(fired.values())
        _sweep(graph, index, fired)
        if sum(fired.values()) == before:
            break
    return fired


def _sweep(graph: Graph, index: dict[str, list[Rewriter]], fired: dict[str, int]) -> None:
    """Apply the rules to each node once, also to nodes that rules make, and count them in `fired`.

    Raises VerifyError if rules fire without end.
    """
    waiting = [node for node in graph.nodes if not isinstance(node.op, Constant)]
    known, erased = set(waiting), set[Node]()
    limit = 20 * len(waiting) + 1000
    waiting.reverse()
    while waiting:
        node = waiting.pop()
        if node in erased:
            continue
        for rule in index.get(node.op.name, ()):
            try:
                new = rule.apply(graph, node)
            except NoMatch:
                new = None
            if new is None:
                continue
            fired[rule.name] = fired.get(rule.name, 0) + 1
            limit -= 1
            if limit < 0:
                raise VerifyError(f"rule {rule.name} fires without end at {node!r}")
            made = _unknown(new, known)
            known.update(made)
            waiting += reversed(made)
            erased |= substitute(graph, node.result, new, fresh=bool(made))
            break


def _unknown(value: Value, known: set[Node]) -> list[Node]:
    """List new nodes that a value depends on, in dependency order."""
    found: dict[Node, None] = {}

    def visit(node: Node | None) -> None:
        if node is None or node in known or node in found or isinstance(node.op, Constant):
            return
        for operand in node.operands:
            visit(operand.node)
        found[node] = None

    visit(value.node)
    return list(found)


def replace_node(graph: Graph, old: Node, new: Node) -> None:
    """Use the results of `new` for those of `old`, whose types they take over, and erase `old`."""
    for before, after in zip(old.results, new.results, strict=True):
        graph.set_type(after, before.type)
        graph.replace(before, after)
    graph.erase(old)


def substitute(graph: Graph, old: Value, new: Value, fresh: bool = False) -> set[Node]:
    """Use `new` for `old` everywhere and erase unused nodes; return the erased ones.

    `new` takes over the origin of all erased nodes. If it is `fresh`, it also takes over the name and the memory order
    of `old`, because these belong to the place in the graph.
    """
    if not old.type.same_value_type(new.type):
        raise VerifyError(f"{new!r} cannot replace {old!r}")
    assert old.node is not None
    name = old.name
    graph.replace(old, new)
    erased = erase_unused(graph, old.node)
    if new.node is not None:
        inherited = [o for n in erased if not isinstance(n.op, Constant) for o in n.origin]
        new.node.origin = tuple(dict.fromkeys((*inherited, *new.node.origin)))
        if fresh:
            graph.rename(new, name)
            graph.set_type(new, old.type)
    return set(erased)


def erase_unused(graph: Graph, node: Node) -> list[Node]:
    """Erase `node` if nothing uses it, then what only it used; return the erased nodes, operands first."""
    erased: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current in erased or any(map(use_count, current.results)):
            continue
        operands = dict.fromkeys(v.node for v in current.operands if v.node is not None)
        graph.erase(current)
        erased[current] = None
        waiting += operands
    return list(reversed(erased))


def use_count(value: Value) -> int:
    """Count the uses of a value. `len(value.uses)` copies, which is quadratic where thousands share a constant."""
    return len(value._uses)  # pyright: ignore[reportPrivateUsage] - counted without a copy


def single_use(value: Value) -> bool:
    return use_count(value) == 1


SomeOp = TypeVar("SomeOp", bound=Op)


def made_by(value: Value, *kinds: type[SomeOp]) -> SomeOp | None:
    """Return the op that computes a value, if it is of one of these kinds."""
    op = value.node.op if value.node is not None else None
    return op if isinstance(op, kinds) else None


def only_operand(value: Value) -> Value:
    """Return the operand of the one-operand node that computes a value."""
    assert value.node is not None
    (operand,) = value.node.operands
    return operand
