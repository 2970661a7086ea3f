"""Run one property on one example: it holds, does not apply, or fails.

A failure has a kind and a signature, so that failures with one cause are recognised.
"""

from __future__ import annotations

import re
import traceback
import unittest
from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

import fusec
from fusec.errors import FusecError
from fusec.ir import Constant, Graph, HostArray
from fusec.system.dataclass import dataclass
from fusec.testing.case import Case, MismatchError, Property, Trust

MISMATCH, ERROR, DIED, HUNG = "mismatch", "error", "died", "hung"
_PACKAGE = str(Path(fusec.__file__).parent)
# Parts of a message that differ between similar examples: names of values, numbers, bracketed lists, quoted words.
_VARIABLE = re.compile(
    r"%\"[^\"]*\"|%[\w.$/:-]+|'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\b(?:inf|nan)\b|[-+]?\d[\d.]*(?:e[-+]?\d+)?"
)


class SkippedError(Exception):
    """The property does not apply to the example."""


@dataclass(frozen=True)
class Failure:
    """The failure of a property.

    how: `mismatch` (the property raised MismatchError), `error` (it raised something else), or `died` or `hung` (of the
        process).
    error: the name of the exception's type, or of the signal.
    where: the innermost function of fusec that was running.
    oracle: for a mismatch, the witness that computed `want`.
    got, want: the arrays that differ.
    """

    how: str
    error: str
    message: str
    where: str = ""
    traceback: str = ""
    oracle: str = ""
    got: Mapping[str, HostArray] = field(default_factory=dict[str, HostArray], repr=False, compare=False)
    want: Mapping[str, HostArray] = field(default_factory=dict[str, HostArray], repr=False, compare=False)

    @property
    def doubt(self) -> bool:
        """Tell if only a witness weaker than the reference found the mismatch.

        Such a failure is no finding until a stronger witness confirms it.
        """
        return self.how == MISMATCH and Trust[self.oracle] < Trust.REFERENCE

    @property
    def kind(self) -> str:
        """Return the first line of the message without names and numbers; equal for similar failures."""
        line = self.message.strip().split("\n")[0]
        return " ".join((self.how, self.error, self.where, _VARIABLE.sub("#", line)[:160]))

    def like(self, other: Failure) -> bool:
        """Tell if a smaller example still fails in the same way; the message may differ."""
        return (self.how, self.error, self.where, self.doubt) == (other.how, other.error, other.where, other.doubt)


def attempt(property: Property, graph: Graph, case: Case) -> Failure | None:
    """Run a property on an example and return its failure; None if it holds.

    A user's own property gets a copy of the graph, because it may change the graph. Properties of fusec do not change
    it, and share results by graph.

    Raises SkippedError if the property does not apply (it raised SkipTest, or Hypothesis' `assume` did not hold).
    """
    try:
        property.check(graph.clone() if ":" in property.name else graph, case)
    except MismatchError as error:
        words = traceback.format_exc()
        return Failure(MISMATCH, type(error).__name__, str(error), "", words, error.oracle.name, error.got, error.want)
    except unittest.SkipTest as error:
        raise SkippedError(str(error)) from error
    except (Exception, SystemExit) as error:  # any error of a property is a finding
        if type(error).__name__ == "UnsatisfiedAssumption":  # by name, because properties also run without Hypothesis
            raise SkippedError(property.name) from error
        name = type(error).__name__
        # fusec's own messages tell enough; that of a KeyError is the key alone
        message = str(error) if isinstance(error, FusecError) else f"{name}: {error}"
        return Failure(ERROR, name, message, _where(error), traceback.format_exc())
    return None


def _where(error: BaseException) -> str:
    """Find the innermost function of fusec, outside fusec.testing, that the error passed through."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and "/testing/" not in path:
            found = f"{Path(path).relative_to(_PACKAGE)}:{frame.f_code.co_name}"
    return found


def ops_of(graph: Graph) -> Counter[str]:
    """Count how often each op occurs, without constants."""
    return Counter(n.op.name for n in graph.nodes if not isinstance(n.op, Constant))


def signature(property: str, failure: Failure, ops: Mapping[str, int]) -> str:
    """Build a text that is equal for findings with presumably one cause.

    It is made of the property, the ops of the smallest graph, and the kind of failure.
    """
    if failure.how == HUNG:  # each attempt to shrink it is slow, so two rarely shrink to the same ops
        return " | ".join((property, "any op", failure.kind))
    counted = "+".join(f"{name}*{count}" if count > 1 else name for name, count in sorted(ops.items()))
    return " | ".join((property, counted or "no op", failure.kind))
