"""Hold a fusion in place: every chain of ops that a pattern names must run as one cuDNN step.

A pattern is a glob over op names joined by `+`, as reports print them: `conv*+add+relu` matches
`conv+add+relu` and `conv+bias+add+relu`. A chain starts at any op and follows results to their users
through pointwise ops, up to one op of any kind; the shortest match counts. Chains that end in the same
op are alternatives (both convolutions that feed a residual add lead to it; one of them takes it): one
of them must be whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fusec.errors import CheckError
from fusec.ir import Node, Return
from fusec.ops import Cast, Pointwise
from fusec.program import Kind, Partition, Program, display_name
from fusec.verdict import Refused

MAX_CHAIN = 24  # ops; cuDNN steps of more than that are not proposed
_CLOSEST = 5


@dataclass(frozen=True)
class Miss:
    """A place where the pattern occurs and is cut into several steps."""

    chain: tuple[Node, ...]
    steps: tuple[Partition, ...]
    reason: str

    def __str__(self) -> str:
        names = "+".join(map(display_name, self.chain))
        origin = ", ".join(dict.fromkeys(o for node in self.chain for o in node.origin)) or "no source node"
        parts = " | ".join(f"{step.kind.value} {step.signature}" for step in self.steps)
        return f"{names} ({origin}) runs as {parts}" + (f": {self.reason}" if self.reason else "")


def check(program: Program, pattern: str) -> tuple[int, list[Miss]]:
    """How many places match the pattern, and those among them that are not one cuDNN step."""
    ends: dict[Node, list[tuple[Node, ...]]] = {}
    for node in program.step_of:
        for chain in _matches((node,), pattern):
            ends.setdefault(chain[-1], []).append(chain)
    misses: list[Miss] = []
    for chains in ends.values():
        if not any(_whole(program, chain) for chain in chains):
            chain = min(chains, key=lambda c: len(_steps(program, c)))
            misses.append(Miss(chain, _steps(program, chain), _reason(program, chain)))
    return len(ends), misses


def assert_fused(program: Program, pattern: str) -> None:
    """CheckError unless the pattern occurs and each of its places is one cuDNN step."""
    places, misses = check(program, pattern)
    if not places:
        there = list(dict.fromkeys(step.signature for step in program.steps))
        close = difflib.get_close_matches(pattern, there, _CLOSEST, cutoff=0.0)
        raise CheckError(f"no chain of ops matches {pattern!r}; closest steps: {', '.join(close)}")
    if misses:
        lines = "\n".join(f"  {miss}" for miss in misses)
        raise CheckError(f"{len(misses)} of {places} places that match {pattern!r} are not one cuDNN step:\n{lines}")


def _matches(chain: tuple[Node, ...], pattern: str) -> Iterator[tuple[Node, ...]]:
    """The shortest continuations of a chain that match."""
    if fnmatchcase("+".join(map(display_name, chain)), pattern):
        yield chain
        return
    last = chain[-1]
    if len(chain) == MAX_CHAIN or (last is not chain[0] and not isinstance(last.op, (Pointwise, Cast))):
        return
    for value in last.results:
        for user in value.users:
            if not isinstance(user.op, Return):
                yield from _matches((*chain, user), pattern)


def _steps(program: Program, chain: tuple[Node, ...]) -> tuple[Partition, ...]:
    return tuple(dict.fromkeys(program.step_of[node] for node in chain))


def _whole(program: Program, chain: tuple[Node, ...]) -> bool:
    steps = _steps(program, chain)
    return len(steps) == 1 and steps[0].kind is Kind.CUDNN


def _reason(program: Program, chain: tuple[Node, ...]) -> str:
    """Why: the refusal that covers most of the chain."""
    wanted = set(chain)
    best = max(program.refusals, key=lambda r: len(wanted.intersection(r.nodes)), default=None)
    if best is None or len(wanted.intersection(best.nodes)) < min(2, len(chain)):
        return ""
    return f"{best.reason.message} ({best.reason.code})" if isinstance(best.reason, Refused) else best.reason
