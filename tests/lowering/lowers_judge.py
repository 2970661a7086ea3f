"""A judge for tests without cuDNN: a graph is legal if it can be lowered."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusec.errors import LoweringError
from fusec.ir import Graph
from fusec.lower_cudnn import lower
from fusec.plans.verdict import Legal, Plan, Refused, Verdict


class LowersJudge:
    """Judges a body legal, with these plans, if it can be lowered.

    longest: nodes of a legal body, at most. without: ops that no legal body has.
    """

    def __init__(
        self,
        plans: tuple[Plan, ...] = (Plan(1, (), True, 0, True),),
        longest: int = 99,
        without: Collection[str] = (),
    ):
        self.plans, self.longest, self.without = plans, longest, without

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        return [self._verdict(body) for body in bodies]

    def _verdict(self, body: Graph) -> Verdict:
        try:
            lower(body)
        except LoweringError as error:
            return Refused("lower", "FUSEC", str(error))
        if any(n.op.name in self.without for n in body.nodes):
            return Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "an op of those that the test leaves out")
        if sum(n.op.name != "constant" for n in body.nodes) > self.longest:
            return Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "too long")
        return Legal(self.plans)
