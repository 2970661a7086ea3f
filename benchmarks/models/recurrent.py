"""Time recurrent networks in fp16 with fusec and with torch, whose cuDNN call is captured as a CUDA graph.

Usage, with a GPU and torch: python -m benchmarks.models.recurrent [CASE...] [--output FILE] [--commit HASH]
Results are compared with torch in float64. CASES lists the networks; without names, all are measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

import fusec
from benchmarks.common.result_files import KEYS, gpu_and_torch, parser, write_row
from benchmarks.common.torch_timing import captured, limits_and_steps, relative_l2, timed
from fusec.diagnostics.step_times import measure

Array = np.ndarray[Any, Any]
ORDERS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}  # of torch's gates, in ONNX


@dataclass(frozen=True)
class Network:
    """Layers of LSTM, GRU or RNN, each of `size` units in one or two directions."""

    cell: str
    layers: int
    size: int
    steps: int
    batch: int
    directions: int = 1

    def in_torch(self, device: str = "cuda") -> torch.nn.RNNBase:
        """Make the network with torch's random weights, in float32."""
        torch.manual_seed(0)
        kind: type[torch.nn.RNNBase] = getattr(torch.nn, self.cell)
        return kind(self.size, self.size, self.layers, bidirectional=self.directions == 2).to(device).eval()

    def in_onnx(self, model: torch.nn.RNNBase) -> bytes:
        """Write the network with the weights of a torch model as ONNX, in float16."""
        nodes: list[Any] = []
        weights: dict[str, Array] = {"shape": np.array([self.steps, self.batch, -1])}
        source = "x"
        direction = "bidirectional" if self.directions == 2 else "forward"
        own: dict[str, Any] = {"hidden_size": self.size, "direction": direction}
        if self.cell == "GRU":
            own["linear_before_reset"] = 1
        for layer in range(self.layers):
            for name, made in self._weights(model, layer).items():
                weights[f"{name}{layer}"] = made
            operands = [source, *(f"{name}{layer}" for name in "wrb")]
            nodes.append(helper.make_node(self.cell, operands, [f"y{layer}"], **own))
            nodes.append(helper.make_node("Transpose", [f"y{layer}"], [f"t{layer}"], perm=(0, 2, 1, 3)))
            nodes.append(helper.make_node("Reshape", [f"t{layer}", "shape"], [f"z{layer}"]))
            source = f"z{layer}"
        shapes = {
            "x": (self.steps, self.batch, self.size),
            source: (self.steps, self.batch, self.directions * self.size),
        }
        info = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name, shape in shapes.items()]
        held = [numpy_helper.from_array(array, name) for name, array in weights.items()]
        graph = helper.make_graph(nodes, "recurrent", info[:1], info[1:], held)
        opsets = [helper.make_opsetid("", 21)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()

    def _weights(self, model: torch.nn.RNNBase, layer: int) -> dict[str, Array]:
        """Return the weights w, r and b of a layer in the order of ONNX."""
        order, found = ORDERS[self.cell], dict[str, list[Array]]()
        state = {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}
        for suffix in ("", "_reverse")[: self.directions]:
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                rows = state[f"{kind}_l{layer}{suffix}"]
                gates = np.split(rows, len(order))
                found.setdefault(kind, []).append(np.concatenate([gates[i] for i in order]).astype(np.float16))
        stacked = {kind: np.stack(parts) for kind, parts in found.items()}
        bias = np.concatenate([stacked["bias_ih"], stacked["bias_hh"]], axis=1)
        return {"w": stacked["weight_ih"], "r": stacked["weight_hh"], "b": bias}


CASES = {
    "lstm": Network("LSTM", 3, 512, 400, 16),
    "lstm_one": Network("LSTM", 1, 512, 400, 1),
    "lstm_large": Network("LSTM", 2, 1024, 100, 64),
    "lstm_both": Network("LSTM", 2, 256, 200, 32, 2),
    "gru": Network("GRU", 3, 512, 400, 16),
    "rnn": Network("RNN", 2, 512, 400, 16),
}


def case(name: str) -> dict[str, Any]:
    """Measure a network."""
    import cupy  # here, because --help needs none

    network = CASES[name]
    model = network.in_torch()
    data = network.in_onnx(model)
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((network.steps, network.batch, network.size)).astype(np.float16)).cuda()
    with torch.inference_mode():
        rounded = model.half()
        rounded.flatten_parameters()  # as cuDNN wants them
        replay, (out, _) = captured(lambda: rounded(x))
        replay()
        results = {"torch": out.clone()}
        want, _ = network.in_torch().half().double()(x.double())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSEC_CACHE"] = folder  # an empty cache
        started = time.perf_counter()
        executable = fusec.compile(data, precision="fp16")
        compiled_s = time.perf_counter() - started
    executable.hold_inputs()  # as torch does
    feeds = {"x": cupy.from_dlpack(x)}
    (y,) = executable.run(None, feeds)
    executable.backend.finish()
    results["fusec"] = torch.from_dlpack(y).clone()
    times = timed({"fusec": executable.replay, "torch": replay})
    executable.run(None, feeds)  # because the first call may have left the library with another stream
    bench = measure(executable, feeds, 10)
    row: dict[str, Any] = {"case": name, "program_steps": len(executable.compiled.program.steps)}
    row |= {"launches": executable.compiled.program.launches, "compile_s": round(compiled_s, 2)}
    if executable.spent is not None:
        row["compile_parts_s"] = {what: round(spent.seconds, 2) for what, spent in executable.spent.stages.items()}
    row["errors"] = {who: relative_l2(got, want) for who, got in results.items()}
    row["times"] = times
    row["torch_over_fusec"] = times["torch"]["median_ms"] / times["fusec"]["median_ms"]
    return row | limits_and_steps(bench)


def main() -> None:
    options = parser(__doc__, "recurrent.json")
    options.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    given = options.parse_args()
    for name in given.cases:
        row = case(name)
        write_row(given.output, gpu_and_torch(), given.commit, row, KEYS["recurrent.json"])
        ms = {who: f"{t['median_ms']:.3f} ms" for who, t in row["times"].items()}
        print(name, ms, row["errors"], f"compiled in {row['compile_s']} s to {row['program_steps']} steps", flush=True)


if __name__ == "__main__":
    main()
