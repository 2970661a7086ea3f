"""Run a property in a process of its own, because it may end or hang that process."""

from __future__ import annotations

from fusec.errors import FusecError
from fusec.ir import Graph
from fusec.testing.case import Case
from fusec.testing.child_process import Child
from fusec.testing.example_codec import encode
from fusec.testing.failure import Failure
from fusec.testing.finding_folder import Finding

WORKER = "fusec.testing.runner.worker"
CHECK_S = 60.0  # time limit when a finding runs again
START_S = 20.0  # to start a worker and import


class Prober:
    """Runner of a property in its own process. A new process replaces one that dies."""

    def __init__(self, property: str, hang_s: float):
        self.property = property
        self.hang_s = hang_s
        self._child: Child | None = None

    def check(self, graph: Graph, case: Case) -> Failure | None:
        """Run the property on an example. Returns its failure, or None if it holds."""
        child = self._child = self._child or Child(WORKER)
        question = {"check": self.property, "example": encode(graph, case), "hang_s": self.hang_s}
        answer = child.ask(question, self.hang_s + START_S)
        if answer is None:
            failure = child.death()
            self.close()
            return failure
        if "checked" not in answer:
            self.close()
            raise FusecError(str(answer.get("failed") or answer.get("defect")))
        return None if answer["checked"] is None else Failure(**answer["checked"])

    def end(self) -> None:
        """Kill the process from another thread. `check` then sees its death."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """Kill the process and free its resources."""
        if self._child is not None:
            self._child.close()
            self._child = None


def check_apart(finding: Finding) -> Failure | None:
    """Run a finding's property in its own process."""
    prober = Prober(finding.property, CHECK_S)
    try:
        return prober.check(finding.graph, finding.case)
    finally:
        prober.close()
