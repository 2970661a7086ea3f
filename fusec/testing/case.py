"""Define the input of a property (Case), its failure (MismatchError) and the property itself.

A property is a function of a graph and a Case. It returns if it holds, and raises MismatchError if it does not.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import field, fields, replace
from typing import Any

from fusec.ir import Graph, HostArray
from fusec.passes.base import Options
from fusec.passes.layout.io_layout import chosen
from fusec.passes.pass_names import current_names
from fusec.system.dataclass import dataclass
from fusec.testing.generators.arrays import draw_feeds


class Trust(enum.IntEnum):
    """Witnesses that results are compared with, in order of trust, the most trusted last.

    A mismatch with the reference is a finding. A mismatch with a weaker witness is a doubt until a stronger witness
    confirms it: if two witnesses differ, the weaker one is more likely wrong.
    """

    DEVICE = 1  # a GPU
    SIMULATOR = 2  # fusec's simulation of cuDNN's documentation, fp32
    ONNXRUNTIME = 3  # an implementation by others, fp32, with optimisations of its own
    ONNX_REFERENCE = 4  # the evaluator of the ONNX specification
    REFERENCE = 5  # the ops' definitions, evaluated in float64


@dataclass(frozen=True, eq=False)
class Case:
    """Everything that a property depends on, except the graph.

    seed, style: how inputs of the graph are drawn (see `fusec.testing.generators.arrays`); unused if `feeds` is given.
    precision, disable, target, channels_last: as in `fusec.compile`.
    judge: a name of `fusec.testing.properties.judges.JUDGES`; it answers whether a partition is legal.
    feeds: the arrays of the inputs, by name; default: drawn from seed and style.
    """

    seed: int = 0
    style: str = "normal"
    precision: str = "fp32"
    disable: frozenset[str] = frozenset()
    judge: str = "lowers"
    target: str = "h200"
    channels_last: bool = False
    feeds: Mapping[str, HostArray] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "disable", current_names(self.disable))  # saved findings have old names

    @property
    def options(self) -> Options:
        return Options.from_names(self.precision, self.disable)

    def options_of(self, graph: Graph) -> Options:
        """Return the options, with the memory orders of this graph's inputs and outputs."""
        return replace(self.options, orders=chosen(graph, self.channels_last, {}))

    def inputs(self, graph: Graph) -> dict[str, HostArray]:
        """Return an array for each input of the graph, by name: from `feeds`, else drawn from seed and style."""
        if self.feeds is not None:
            return {v.name: self.feeds[v.name] for v in graph.inputs}
        return draw_feeds(graph, self.seed, self.style)

    def to_json(self) -> dict[str, Any]:
        """Return the case as JSON data, without the feeds."""
        options = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "feeds"}
        return {**options, "disable": sorted(self.disable)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], feeds: Mapping[str, HostArray] | None = None) -> Case:
        """Restore a case from the data of `to_json`, with the feeds if they were saved."""
        options = dict(data)
        disable = frozenset[str](options.pop("disable"))
        return cls(**options, disable=disable, feeds=feeds)


class MismatchError(AssertionError):
    """A property does not hold.

    got, want: the arrays that differ, by name; empty if no arrays were compared.
    oracle: the witness that computed `want`.
    """

    def __init__(
        self,
        message: str,
        got: Mapping[str, HostArray] | None = None,
        want: Mapping[str, HostArray] | None = None,
        oracle: Trust = Trust.REFERENCE,
    ):
        super().__init__(message)
        self.got = dict(got or {})
        self.want = dict(want or {})
        self.oracle = oracle


Check = Callable[[Graph, Case], None]


@dataclass(frozen=True)
class Property:
    """A named check.

    needs: the software or device that the check requires: empty (nothing), `onnxruntime`, `cudnn` or `gpu`.
    """

    name: str
    check: Check
    needs: str = ""

    @property
    def summary(self) -> str:
        """Return the first line of the check's docstring."""
        return (self.check.__doc__ or "").strip().split("\n")[0]
