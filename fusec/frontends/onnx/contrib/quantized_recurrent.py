"""Import LSTMs whose weights onnxruntime's quantiser rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.ops.recurrent import lstm
from fusec.ir import DType, Value
from fusec.ops import Transpose, pw
from fusec.ops.spec import require


def dynamic_quantize_lstm(
    g: Emitter,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None,
    lengths: Value | None,
    initial_h: Value | None,
    initial_c: Value | None,
    peepholes: Value | None,
    w_scale: Value,
    w_zero: Value,
    r_scale: Value,
    r_zero: Value,
    /,
    *,
    activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (),
    activations: Sequence[str] = (),
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    input_forget: int = 0,
) -> tuple[Value, ...]:
    """Import DynamicQuantizeLSTM as an LSTM with dequantised weights w[D, I, 4*H] and r[D, H, 4*H].

    onnxruntime also rounds the input and the state of each step to 8 bits. fusec does not, which is more exact.
    """
    return lstm(
        g,
        x,
        _weights(g, w, w_scale, w_zero),
        _weights(g, r, r_scale, r_zero),
        b,
        lengths,
        initial_h,
        initial_c,
        peepholes,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activations=activations,
        clip=clip,
        direction=direction,
        hidden_size=hidden_size,
        input_forget=input_forget,
    )


def _weights(g: Emitter, codes: Value, scale: Value, zero: Value) -> Value:
    """Dequantise and transpose weights, by one scale for each direction, or for each of its columns."""
    require(codes.type.rank == 3, f"weights have shape {list(codes.type.shape)}, not [directions, inputs, columns]")
    directions, _, columns = codes.type.shape
    per: dict[tuple[int, ...], int] = {(directions,): 1, (directions, columns): columns}
    for given in (scale, zero):
        require(given.type.shape in per, f"{given.type} is no number for each direction or column of {codes.type}")
    wide = (g.reshape(v, (directions, 1, per[v.type.shape])) for v in (scale, zero))
    factor, point = (g.cast(v, DType.F32) for v in wide)
    numbers = g(pw("mul"), g(pw("sub"), g.cast(codes, DType.F32), point), factor)
    return g(Transpose((0, 2, 1)), numbers)


TABLE: Mapping[str, OpFunction] = {"DynamicQuantizeLSTM": dynamic_quantize_lstm}
