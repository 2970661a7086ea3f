"""The oracle of the partitioner: lower a body, put the graph to cuDNN, hand back its verdict."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.cudnn_graph import CudnnGraph
from fusec.errors import LoweringError
from fusec.gpu.oracle import Oracle
from fusec.ir import Graph
from fusec.lower_cudnn import lower
from fusec.verdict import Refused, Verdict


class CudnnJudge:
    """Judges bodies by the real cuDNN. A body that cannot be lowered is refused at stage `lower`."""

    def __init__(self, oracle: Oracle, tensor_cores: bool):
        self.oracle = oracle
        self.tensor_cores = tensor_cores

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        graphs: dict[int, CudnnGraph] = {}
        for index, body in enumerate(bodies):
            try:
                graphs[index] = lower(body, self.tensor_cores).graph
            except LoweringError as error:
                verdicts[index] = Refused("lower", "FUSEC", str(error))
        answers = self.oracle.judge(list(graphs.values()))
        verdicts.update(zip(graphs, answers, strict=True))
        return [verdicts[index] for index in range(len(bodies))]
