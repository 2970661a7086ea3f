"""What a property is given beside a graph, and what it raises when it does not hold.

A property is a function of a graph and a Case; it returns when it holds and raises MismatchError when it does not.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fusec.ir import Graph
from fusec.passes.base import Options
from fusec.passes.layout.io_layout import chosen
from fusec.testing.generators.arrays import draw_feeds

Array = np.ndarray[Any, Any]


class Trust(enum.IntEnum):
    """Who says what the right answer is, the most trusted last.

    A mismatch with the reference is a finding. One with a weaker oracle is a doubt until a stronger one
    has spoken: when two oracles differ, the weaker is the suspect.
    """

    DEVICE = 1  # what a GPU computed
    SIMULATOR = 2  # our reading of cuDNN's documentation, fp32
    ONNXRUNTIME = 3  # an implementation by others, fp32, with optimisations of its own
    ONNX_REFERENCE = 4  # the evaluator of the ONNX specification
    REFERENCE = 5  # the ops' definitions, evaluated in float64


@dataclass(frozen=True, eq=False)
class Case:
    """All that a property depends on but the graph.

    seed, style: how the graph's inputs are drawn (see `fusec.testing.generators.arrays`), unless `feeds` holds them.
    precision, disable, target, channels_last: as in `fusec.compile`.
    judge: who decides what is legal, a name of `fusec.testing.properties.oracles.JUDGES`.
    """

    seed: int = 0
    style: str = "normal"
    precision: str = "fp32"
    disable: frozenset[str] = frozenset()
    judge: str = "lowers"
    target: str = "h200"
    channels_last: bool = False
    feeds: Mapping[str, Array] | None = field(default=None, repr=False)

    @property
    def options(self) -> Options:
        return Options.from_names(self.precision, self.disable)

    def options_of(self, graph: Graph) -> Options:
        """Those, and the memory orders of this graph's inputs and outputs."""
        return replace(self.options, orders=chosen(graph, self.channels_last, {}))

    def inputs(self, graph: Graph) -> dict[str, Array]:
        """An array for each input of the graph, by name: the given ones, else drawn from seed and style."""
        if self.feeds is not None:
            return {v.name: self.feeds[v.name] for v in graph.inputs}
        return draw_feeds(graph, self.seed, self.style)

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the feeds."""
        return {
            "seed": self.seed,
            "style": self.style,
            "precision": self.precision,
            "disable": sorted(self.disable),
            "judge": self.judge,
            "target": self.target,
            "channels_last": self.channels_last,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], feeds: Mapping[str, Array] | None = None) -> Case:
        """What `to_json` gave, with the feeds if they were kept."""
        return cls(
            data["seed"],
            data["style"],
            data["precision"],
            frozenset(data["disable"]),
            data["judge"],
            data["target"],
            data.get("channels_last", False),  # findings may be older
            feeds,
        )


class MismatchError(AssertionError):
    """A property does not hold.

    `got` and `want` are the arrays that differ, by name, where arrays were compared; `oracle` says who
    holds `want` to be right.
    """

    def __init__(
        self,
        message: str,
        got: Mapping[str, Array] | None = None,
        want: Mapping[str, Array] | None = None,
        oracle: Trust = Trust.REFERENCE,
    ):
        super().__init__(message)
        self.got = dict(got or {})
        self.want = dict(want or {})
        self.oracle = oracle


Check = Callable[[Graph, Case], None]


@dataclass(frozen=True)
class Property:
    """A named check. `needs` is what a machine must have for it: nothing, `onnxruntime`, `cudnn` or `gpu`."""

    name: str
    check: Check
    needs: str = ""

    @property
    def summary(self) -> str:
        """The first line of the check's docstring."""
        return (self.check.__doc__ or "").strip().split("\n")[0]
