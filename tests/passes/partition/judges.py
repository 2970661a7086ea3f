"""Judges for the tests: accept everything, follow the measured rules, or answer from a recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.ir import Constant, DType, Graph
from fusec.ops import Cast, Conv, ConvTranspose, MatMul, Pointwise, Reduce
from fusec.passes.partition import canonical_key
from fusec.plans.verdict import Legal, Plan, Refused, Verdict

FAST = Legal((Plan(11, (), True, 0, True), Plan(7, (), False)))
RUNTIME = Legal((Plan(7, (), False, 0, True),))
GENERIC = Legal((Plan(0, (), True, 0, True), Plan(7, (), False)))


class AcceptAll:
    """Every body is legal, with a precompiled plan."""

    def __init__(self) -> None:
        self.asked: list[Graph] = []
        self.waves = 0

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        self.asked.extend(bodies)
        self.waves += 1
        return [self.verdict(body) for body in bodies]

    def verdict(self, body: Graph) -> Verdict:
        return FAST


class Measured(AcceptAll):
    """Verdicts of cuDNN 9.19 for an H200 as measured, for the graphs of the tests."""

    def verdict(self, body: Graph) -> Verdict:
        nodes = [
            n
            for n in body.nodes
            if not isinstance(n.op, Constant) and n.op.name not in ("reshape", "transpose", "split", "slice")
        ]
        convs = [n for n in nodes if isinstance(n.op, (Conv, ConvTranspose))]
        products = [n for n in nodes if isinstance(n.op, MatMul)]
        reductions = [n for n in nodes if isinstance(n.op, Reduce)]
        if any(n.op.name in ("sign", "round", "atan") for n in nodes):
            return Refused("lower", "", "cuDNN has no pointwise mode for it")
        shared = len({n.operands[0] for n in products}) == 1 and not convs
        if len(convs) + len(products) > 1 and not shared:
            return Refused("plan", "NOT_SUPPORTED", "two convolutions or products in one graph")
        if products:
            return RUNTIME
        if any(n.op.name == "attention" for n in nodes):
            return RUNTIME
        if reductions:
            if reductions[0].result.type.dtype is not DType.F32:
                return Refused("lower", "FUSEC", "cuDNN stores the result of a reduction in fp32 only")
            axes, x = reductions[0].op.attributes["axes"], reductions[0].operands[0].type
            order = [d in axes for d in x.order or range(x.rank) if x.shape[d] != 1]
            matrix = sorted(order) == order or sorted(order, reverse=True) == order
            return RUNTIME if matrix else Refused("plan", "NOT_SUPPORTED", "reduction over these dims")
        if not convs:
            whole = max((v.type for n in nodes for v in n.results), key=lambda t: t.size)
            orders = {v.type.order for n in nodes for v in n.operands if v.type.shape == whole.shape}
            if len(orders) > 1 or not all(isinstance(n.op, (Pointwise, Cast)) for n in nodes):
                return Refused("plan", "NOT_SUPPORTED", "no engine")
            return RUNTIME
        conv = convs[0]
        if len(nodes) == 1:
            return FAST
        if any(v.type.shape == (*conv.result.type.shape[:2], 1, 1) for v in body.inputs):
            return Refused("lower", "FUSEC", "an operand per image and channel")
        if len(body.outputs) > 1 or isinstance(conv.op, ConvTranspose):
            return RUNTIME
        chain: list[str] = []
        value = conv.result
        for node in nodes[1:]:
            if value not in node.operands:
                return RUNTIME
            if node.op.name == "add":
                other = node.operands[1]
                chain.append("b" if other.literal is not None else "z" if node.operands[0] is value else "?")
            else:
                chain.append(node.op.name)
            value = node.result
        text = " ".join(chain)
        if text in ("b", "b relu", "z b", "z b relu"):
            return FAST
        return GENERIC if text.removeprefix("z ") in ("b clip", "b sigmoid", "b tanh", "b elu") else RUNTIME


class OneConvolution(AcceptAll):
    """Refuses anything after a convolution: the first epilogue op is one too many."""

    def verdict(self, body: Graph) -> Verdict:
        names = [n.op.name for n in body.nodes if not isinstance(n.op, Constant)]
        if "conv" in names and len(names) > 1:
            return Refused("plan", "NOT_SUPPORTED", "no epilogue today")
        return FAST


class Recorded(AcceptAll):
    """Answers by canonical key; a body that was not recorded is an error."""

    def __init__(self, answers: Mapping[str, Verdict]):
        super().__init__()
        self.answers = answers

    def verdict(self, body: Graph) -> Verdict:
        return self.answers[canonical_key(body)]
