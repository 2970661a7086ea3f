"""Require a fusion: every sequence of ops that a pattern names must run as one step.

cuDNN, cuBLASLt or a kernel of fusec may run the step, because on a GPU the fastest one does. `cudnn_only` requires
cuDNN.

A pattern is a glob over op names joined by `+`, as reports print them: `conv*+add+relu` matches `conv+add+relu` and
`conv+bias+add+relu`. A sequence starts at any op. It follows results to their users through pointwise ops, and may
end in an op of any kind; the shortest match counts. Sequences that end in the same op are alternatives, of which one
must be one step. For example, two convolutions may feed a residual add, but only one of them can contain it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from fusec.errors import CheckError
from fusec.ir import Node, Return
from fusec.ops import POINTWISE_OPS
from fusec.plans.verdict import Refused
from fusec.schedule.program import Partition, Program, display_name
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable

MAX_OPS = 24  # in a sequence, because fusec proposes no larger cuDNN step
_CLOSEST = 5
_CUDNN = "cudnn"


@dataclass(frozen=True)
class NotFused:
    """A place where the pattern occurs and is not one step. `runners`: library or kind of each step."""

    nodes: tuple[Node, ...]
    steps: tuple[Partition, ...]
    runners: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        names = "+".join(map(display_name, self.nodes))
        origin = ", ".join(dict.fromkeys(o for node in self.nodes for o in node.origin)) or "no source node"
        each = zip(self.runners, self.steps, strict=True)
        parts = " | ".join(f"{runner} {step.signature}" for runner, step in each)
        return f"{names} ({printable(origin)}) runs as {parts}" + (f": {self.reason}" if self.reason else "")


def check(
    program: Program, pattern: str, cudnn_only: bool = False, libraries: Mapping[Partition, str] | None = None
) -> tuple[int, list[NotFused]]:
    """Count the places that match the pattern, and return those that are not one step.

    cudnn_only: count only steps that cuDNN runs.
    libraries: library of each step, if plans were chosen (`Executable.libraries`); the default is the step's kind.
    """
    known = libraries or {}

    def runner(step: Partition) -> str:
        return known.get(step, step.kind.value)

    ends = _matches(program, Glob(pattern))
    misses: list[NotFused] = []
    for runs in ends.values():
        whole = [program.step_of[run.node] for run in runs if run.crossings == 0]
        if not any(not cudnn_only or runner(step) == _CUDNN for step in whole):
            nodes = min(runs, key=lambda run: run.cost).nodes()
            steps = tuple(dict.fromkeys(program.step_of[node] for node in nodes))
            misses.append(NotFused(nodes, steps, tuple(map(runner, steps)), _reason(program, nodes)))
    return len(ends), misses


def assert_fused(
    program: Program, pattern: str, cudnn_only: bool = False, libraries: Mapping[Partition, str] | None = None
) -> None:
    """Check that the pattern occurs and that each of its places is one step. Parameters as for `check`.

    Raises CheckError if it does not occur, or a place is not one step.
    """
    places, misses = check(program, pattern, cudnn_only, libraries)
    if not places:
        there = list(dict.fromkeys(step.signature for step in program.steps))
        close = difflib.get_close_matches(pattern, there, _CLOSEST, cutoff=0.0)
        raise CheckError(f"no sequence of ops matches {pattern!r}; closest steps: {', '.join(close)}")
    if misses:
        lines = "\n".join(f"  {miss}" for miss in misses)
        wanted = "one cuDNN step" if cudnn_only else "one step"
        raise CheckError(f"{len(misses)} of {places} places that match {pattern!r} are not {wanted}:\n{lines}")


@dataclass(frozen=True, eq=False)
class _OpSequence:
    """A sequence of ops, as its last node and the sequence before that.

    crossings: number of times that it passes from one step to another.
    """

    node: Node
    before: _OpSequence | None
    length: int
    crossings: int

    @property
    def cost(self) -> tuple[int, int]:
        return self.crossings, self.length

    def nodes(self) -> tuple[Node, ...]:
        backwards: list[Node] = []
        run: _OpSequence | None = self
        while run is not None:
            backwards.append(run.node)
            run = run.before
        return tuple(reversed(backwards))


def _matches(program: Program, glob: Glob) -> dict[Node, list[_OpSequence]]:
    """Return the shortest sequences that match, by their last op.

    Of the sequences that reach an op with the glob in the same state, only the one through the fewest steps continues.
    So the time grows with the graph, and not with the number of paths through it, which doubles at every residual.
    """
    ends: dict[Node, list[_OpSequence]] = {}
    going: dict[Node, dict[tuple[frozenset[int], bool], _OpSequence]] = {}
    for node in program.step_of:  # steps, and nodes within them, are in an order that respects dependencies
        arrived = going.pop(node, {})
        first = glob.advance(glob.start, display_name(node))
        for (state, alone), run in [*arrived.items(), ((first, True), _OpSequence(node, None, 1, 0))]:
            if glob.accepts(state):
                ends.setdefault(node, []).append(run)
                continue
            if run.length == MAX_OPS or not (alone or isinstance(node.op, POINTWISE_OPS)):
                continue
            for user in dict.fromkeys(u for value in node.results for u in value.users):
                if isinstance(user.op, Return):
                    continue
                following = glob.advance(state, f"+{display_name(user)}")
                if not following:
                    continue
                crosses = program.step_of[user] is not program.step_of[node]
                longer = _OpSequence(user, run, run.length + 1, run.crossings + crosses)
                known = going.setdefault(user, {}).get((following, False))
                if known is None or longer.cost < known.cost:
                    going[user][following, False] = longer
    return ends


class Glob:
    """A glob that is matched piece by piece.

    A state is the set of positions in the pattern that the text so far may have reached. No text matches from the
    empty state.
    """

    def __init__(self, pattern: str):
        self._tokens: list[str] = re.findall(r"\*|\[!?\]?[^\]]*\]|[\s\S]", pattern)
        self._known: dict[tuple[int, str], bool] = {}
        self.start = self._past_stars({0})

    def advance(self, state: frozenset[int], text: str) -> frozenset[int]:
        """Return the state after reading `text` as well."""
        for character in text:
            reached = {at if self._tokens[at] == "*" else at + 1 for at in state if self._takes(at, character)}
            state = self._past_stars(reached)
        return state

    def accepts(self, state: frozenset[int]) -> bool:
        """Tell if the text so far matches the whole pattern."""
        return len(self._tokens) in state

    def _takes(self, at: int, character: str) -> bool:
        if at == len(self._tokens):
            return False
        key = (at, character)
        if key not in self._known:
            self._known[key] = fnmatchcase(character, self._tokens[at])
        return self._known[key]

    def _past_stars(self, places: set[int]) -> frozenset[int]:
        """Add the places after stars, because a star may also match nothing."""
        reached = set(places)
        for at in range(min(places, default=0), len(self._tokens)):
            if at in reached and self._tokens[at] == "*":
                reached.add(at + 1)
        return frozenset(reached)


def _reason(program: Program, nodes: tuple[Node, ...]) -> str:
    """Return the reason of the refusal that covers most of the sequence."""
    wanted = set(nodes)
    best = max(program.refusals, key=lambda r: len(wanted.intersection(r.nodes)), default=None)
    if best is None or len(wanted.intersection(best.nodes)) < min(2, len(nodes)):
        return ""
    return f"{best.reason.message} ({best.reason.code})" if isinstance(best.reason, Refused) else best.reason
