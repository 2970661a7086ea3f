"""Count the ops, attributes, types, rules and partitions that the fuzzer has exercised, and find the holes.

Counters can be merged and are plain data. `instrument.py` counts events inside the compiler.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from fusec.ir import NUMBERS, Constant, DType, Graph, Node, Op, Value, channels_last
from fusec.lowering.cudnn_graph import PORTS
from fusec.ops import ALL
from fusec.passes import PIPELINE, rules_by_pass
from fusec.passes.base import PRECISIONS
from fusec.passes.partition.equivalent_spellings import FOR_ENGINES
from fusec.schedule.program import Kind
from fusec.testing.case import Case
from fusec.testing.generators.arrays import STYLES

WIDTH = 118  # characters of a line

# The values an attribute may take, where its type does not say so. A test holds them against the ops.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "pad.mode": ("constant", "reflect", "edge", "wrap"),
    "resize.mode": ("nearest", "linear"),
    "resize.coordinates": (
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
    ),
    "resize.rounding": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    "scatter.reduction": ("none", "add", "mul", "max", "min"),
    "grid_sample.mode": ("nearest", "linear", "cubic"),
    "grid_sample.padding": ("zeros", "border", "reflection"),
    "grid_sample.coordinates": ("edges", "centres", "pixels"),
    "roi_align.mode": ("avg", "max"),
    "cumulate.kind": ("sum", "prod"),
    "recurrent.cell": ("lstm", "gru", "rnn"),
    "recurrent.direction": ("forward", "reverse", "bidirectional"),
    "reduce.kind": ("sum", "mean", "max", "min", "prod", "l1", "l2", "sum_square", "log_sum", "log_sum_exp"),
}
_ONES = ("1", ">1")
BUCKETS: Mapping[str, tuple[str, ...]] = {
    "strides": _ONES,
    "dilations": _ONES,
    "groups": _ONES,
    "offset_groups": _ONES,
    "steps": ("1", ">1", "<0"),
    "pads": ("0", "even", "uneven"),
    "output_padding": ("0", ">0"),
    "axes": ("none", "one", "several"),
}
ORDERS = ("row-major", "channels last", "other")
FEATURES = (
    "fan-out",
    "diamond",
    "several outputs",
    "output used inside",
    "shared constant",
    "broadcast",
    "empty tensor",
)
_SHOWN = 24  # entries shown of a section of `OPEN`


class Coverage:
    """Counters by section.

    Sections: `ops`, `attributes`, `dtypes`, `ranks`, `orders`, `features`, `styles`, `precisions`, `judges`,
    `disabled`, `passes`, `rules`, `steps`, `partitions`, `spellings`, `calls`, and `kernels` (kernel families that
    ran on a GPU).
    """

    def __init__(self, sections: Mapping[str, Mapping[str, int]] | None = None):
        self.sections: dict[str, Counter[str]] = {name: Counter(counts) for name, counts in (sections or {}).items()}

    def add(self, section: str, key: str, count: int = 1) -> None:
        self.sections.setdefault(section, Counter())[key] += count

    def merge(self, other: Coverage) -> None:
        for section, counts in other.sections.items():
            self.sections.setdefault(section, Counter()).update(counts)

    def observe(self, graph: Graph, case: Case) -> None:
        """Count the ops, types and features of a graph, and the options of a case."""
        ops, attributes = self._of("ops"), self._of("attributes")
        for node in graph.nodes:
            if not isinstance(node.op, Constant):
                ops[node.op.name] += 1
                for key in _attributes(node.op):
                    attributes[key] += 1
        dtypes, ranks, orders = self._of("dtypes"), self._of("ranks"), self._of("orders")
        for value in graph.values():
            dtypes[value.type.dtype.value] += 1
            ranks[str(value.type.rank)] += 1
            if value.type.rank > 1:
                order = value.type.order
                orders["row-major" if not order else _order(order)] += 1
        self._of("features").update(set(_features(graph)))
        self.add("styles", case.style)
        self.add("precisions", case.precision)
        self.add("judges", case.judge)
        self.add("disabled", "some" if case.disable else "none")

    def _of(self, section: str) -> Counter[str]:
        return self.sections.setdefault(section, Counter())

    def holes(self) -> dict[str, list[str]]:
        """List the expected entries that have not occurred, by section."""
        found: dict[str, list[str]] = {}
        for section, wanted in expected().items():
            missing = [key for key in wanted if not self.sections.get(section, {}).get(key)]
            if missing:
                found[section] = missing
        return found

    def to_json(self) -> dict[str, dict[str, int]]:
        return {name: dict(sorted(counts.items())) for name, counts in sorted(self.sections.items())}

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, int]]) -> Coverage:
        return cls(data)

    def __str__(self) -> str:
        """Format the holes, and a table for each section, rare entries first."""
        holes = self.holes()
        lines = ["holes" if holes else "no holes"]
        lines += [line for section, keys in holes.items() for line in _wrapped(section, keys)]
        for section in dict.fromkeys((*expected(), *sorted(self.sections))):
            counts = self.sections.get(section, Counter[str]())
            entries = sorted((item for item in counts.items() if item[1]), key=lambda item: (item[1], item[0]))
            if section in OPEN and len(entries) > _SHOWN:
                left = f"… and {len(entries) - _SHOWN} rarer"
                entries = entries[-_SHOWN:]
            else:
                left = ""
            if entries:
                lines += _wrapped(section, [*([left] if left else []), *(f"{key} {count}" for key, count in entries)])
        return "\n".join(lines)


OPEN = frozenset({"partitions", "calls", "attributes"})  # sections with many entries, of which frequent ones are shown


@functools.cache
def expected() -> dict[str, tuple[str, ...]]:
    """Return the entries that should occur, by section."""
    return {
        "ops": tuple(op.name for op in ALL),
        "attributes": tuple(key for op in ALL for key in _expected_attributes(op)),
        "dtypes": tuple(d.value for d in NUMBERS if not d.is_narrow),
        "ranks": tuple(map(str, range(6))),
        "orders": ORDERS,
        "features": FEATURES,
        "styles": tuple(STYLES),
        "precisions": PRECISIONS,
        "disabled": ("none", "some"),
        "passes": tuple(dict.fromkeys(step.name for step in PIPELINE)),
        "rules": tuple(
            dict.fromkeys(f"{step}.{rule.name}" for step, known in rules_by_pass().items() for rule in known)
        ),
        "steps": tuple(kind.value for kind in Kind),
        "spellings": tuple(FOR_ENGINES),
        "calls": tuple(PORTS),
    }


def _expected_attributes(op: type[Op]) -> Iterator[str]:
    for item in fields(cast("Any", op)):
        key = f"{op.name}.{item.name}"
        if key in CHOICES:
            values: tuple[str, ...] = CHOICES[key]
        elif item.name in BUCKETS and (item.name, str(item.type)) != ("steps", "int"):  # those of a loop are any number
            values = BUCKETS[item.name]
        elif item.type in ("bool", bool):
            values = ("false", "true")
        elif item.type in ("float", float) and item.default is not MISSING:
            values = ("default", "other")
        else:
            continue
        yield from (f"{key}={value}" for value in values)


@functools.lru_cache(4096)
def _attributes(op: Op) -> tuple[str, ...]:
    """Describe each attribute of an op by the kind of its value, so that different pads count as one kind."""
    found: list[str] = []
    for item in fields(cast("Any", op)):
        kind = _kind(item.name, getattr(op, item.name), item.default)
        if kind:
            found.append(f"{op.name}.{item.name}={kind}")
    return tuple(found)


def _kind(name: str, value: Any, default: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value
    if isinstance(value, DType):
        return value.value
    if isinstance(value, float):
        return "" if default is MISSING else "default" if value == default else "other"
    if name in ("groups", "offset_groups"):
        return ">1" if value > 1 else "1"
    if name == "axis":
        return "<0" if value < 0 else ">0" if value else "0"
    return _tuple_kind(name, value) if isinstance(value, tuple) else ""


def _tuple_kind(name: str, value: tuple[Any, ...]) -> str:
    if name == "axes":
        return ("none", "one")[len(value)] if len(value) < 2 else "several"
    if name == "pads":
        half = len(value) // 2
        return "0" if not any(value) else "even" if value[:half] == value[half:] else "uneven"
    if name == "output_padding":
        return ">0" if any(value) else "0"
    if name in ("strides", "dilations", "steps"):
        return "<0" if any(v < 0 for v in value) else ">1" if any(v > 1 for v in value) else "1"
    return ""


def _order(order: tuple[int, ...]) -> str:
    return "channels last" if len(order) > 2 and order == channels_last(len(order)) else "other"


def _features(graph: Graph) -> Iterator[str]:
    """Find structures of a graph that compilers often get wrong."""
    outputs = graph.outputs
    if len(outputs) > 1:
        yield "several outputs"
    forks: dict[Value, set[Value]] = {}  # values with several readers that a value depends on
    for value in graph.values():
        if value.type.size == 0:
            yield "empty tensor"
        if value.node is not None and not isinstance(value.node.op, Constant) and len(value.users) > 1:
            yield "fan-out"
        if value.literal is not None and len(value.users) > 1:
            yield "shared constant"
    for node in graph.nodes:
        of_operands = [
            {v, *forks.get(v, set())} if len(v.users) > 1 else forks.get(v, set())
            for v in dict.fromkeys(node.operands)
            if v.literal is None
        ]
        if _overlap(of_operands):
            yield "diamond"
        for result in node.results:
            forks[result] = set().union(*of_operands)
        if _broadcasts(node):
            yield "broadcast"
    if any(user is not graph.return_node for v in outputs if v.node is not None for user in v.users):
        yield "output used inside"


def _overlap(forks: list[set[Value]]) -> bool:
    """Tell if two operands depend on the same fork."""
    return any(forks[i] & forks[j] for i in range(len(forks)) for j in range(i))


def _broadcasts(node: Node) -> bool:
    shapes = {v.type.shape for v in node.operands}
    return (
        len(shapes) > 1
        and len(node.results) == 1
        and node.op.name not in ("conv", "conv_flipped", "matmul", "gather", "concat")
    )


def _wrapped(title: str, words: list[str]) -> list[str]:
    """Format `  title  a, b, c` in lines of at most WIDTH characters."""
    lines: list[str] = []
    line = f"  {title:11}"
    for index, word in enumerate(words):
        item = word if index == len(words) - 1 else f"{word},"
        if len(line) + 1 + len(item) > WIDTH and line.strip():
            lines.append(line)
            line = " " * 13
        line += f" {item}"
    return [*lines, line]
