"""Draw layers of LSTM, GRU and RNN."""

from __future__ import annotations

from fusec.ir import DType, TensorType, Value
from fusec.ops import Recurrent
from fusec.ops.recurrent import DEFAULT_ACTIVATIONS, GATES
from fusec.testing.generators.graph_builder import RandomGraph

# without functions that jump, and those whose slope is above one, because errors would grow with every step
ACTIVATIONS = ("tanh", "sigmoid", "relu", "softsign", "hard_sigmoid", "leaky_relu", "elu", "scaled_tanh", "affine")


def recurrent(b: RandomGraph) -> None:
    """Draw a layer over values of the graph, bounded so that the activations are not all flat."""
    cell = b.pick(list(GATES))
    direction = b.pick(["forward", "reverse", "bidirectional"])
    count, size = 2 if direction == "bidirectional" else 1, b.pick([2, 4, 3, 1, 8])
    steps, batch = b.pick([3, 1, 2, 5]), b.pick([2, 1, 3])
    width = GATES[cell] * size
    linear = cell == "gru" and b.chance(50)
    names: list[str] = []
    if b.chance(30):
        names = [b.pick(ACTIVATIONS) for _ in range(count * len(DEFAULT_ACTIVATIONS[cell]))]
    numbers = [(b.pick([0.5, 0.25]), b.pick([0.5, 0.125])) for _ in names] if b.chance(50) else []
    op = Recurrent(
        cell,
        direction,
        tuple(names),
        tuple(alpha for alpha, _ in numbers),
        tuple(beta for _, beta in numbers),
        b.pick([0.0, 0.0, 1.0, 0.5]),
        cell == "lstm" and b.chance(20),
        linear,
    )

    def operand(*shape: int, limit: float = 1.0) -> Value:
        return b.bounded(b.fresh(TensorType(shape, b.dtype)), -limit, limit)

    x = b.bounded(b.like(b.fresh(TensorType((steps, batch, count * width), b.dtype))), -4.0, 4.0)
    operands = [x, operand(count, width, size, limit=0.5), *(operand(count, batch, size) for _ in range(op.states))]
    if linear and b.chance(60):
        operands.append(operand(count, size))
    if cell == "lstm" and b.chance(30):
        operands.append(operand(count, 3 * size))
    if b.chance(40):
        lengths = b.fresh(TensorType((batch,), b.pick([DType.I64, DType.I32])))
        # to onnxruntime, an empty sequence ends in zeros, and not in its first state
        operands.append(b.pointwise("clip", lengths, min=1.0, max=float(b.pick([steps, steps + 2]))))
    b.insert(op, *operands)
