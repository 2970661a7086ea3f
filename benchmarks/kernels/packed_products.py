"""Time products of few rows with packed weights against the same products in fp16, by fusec and by torch, on one GPU.

Usage, with a GPU and torch: python -m benchmarks.kernels.packed_products [ROWSxDEPTHxCOLUMNS:BITS:BLOCK ...]
A case is a chain of products, there and back, whose weights together exceed the L2 cache: as in a decoder, each product
reads its weights from memory. Times are of one product, within the captured graph of the chain. The limit is that of
the bytes of weights and scales. Writes benchmarks/results/packed_products.json. With --simulate, small chains run in
simulation on any machine: results are checked, and nothing is timed or written.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import fusec
from benchmarks.common.result_files import KEYS, gpu_and_torch, parser, write_row
from fusec.gpu import device
from fusec.ops import PackedMatMul
from fusec.runtime import Executable
from fusec.schedule.program import Kind

# torch is imported within functions, because a run in simulation does not need it.

NAME = "packed_products.json"
CASES = [
    *("1x14336x4096:4:32", "1x4096x14336:4:32", "1x4096x14336:4:128", "1x4096x4096:4:32", "1x4096x14336:8:32"),
    *("4x4096x14336:4:32", "8x4096x14336:4:32", "16x4096x14336:4:32"),
]
CHAIN_BYTES = 1 << 28  # of weights, about: several times the L2 cache
FORMS: dict[str, tuple[str, ...]] = {"packed": (), "fp16": ("keep_packed_weights",)}
Array = np.ndarray[Any, Any]
Packed = tuple[Array, Array]  # bytes [columns, blocks, bytes of a block], and scales [columns, blocks]


@dataclass(frozen=True)
class Chain:
    """Products x @ w1 @ w2 …, where each product with [depth, columns] is followed by one with [columns, depth].

    bits: of an integer weight. block: weights along the depth that share a scale of 16 bits.
    """

    rows: int
    depth: int
    columns: int
    bits: int
    block: int
    pairs: int

    @classmethod
    def of(cls, case: str, small: bool) -> Chain:
        shape, bits, block = case.split(":")
        rows, depth, columns = map(int, shape.split("x"))
        if small:
            depth, columns = depth // 16, columns // 16
        nbytes = depth * columns * int(bits) // 8
        return cls(rows, depth, columns, int(bits), int(block), 1 if small else max(1, CHAIN_BYTES // (2 * nbytes)))

    @property
    def count(self) -> int:
        """The number of products."""
        return 2 * self.pairs

    @property
    def nbytes(self) -> int:
        """The bytes of the weights and scales of one product."""
        return self.depth * self.columns * self.bits // 8 + self.depth * self.columns // self.block * 2

    def x(self) -> Array:
        return np.random.default_rng(5).standard_normal((self.rows, self.depth)).astype(np.float16)

    def weights(self) -> list[Packed]:
        """Draw the weights of all products."""
        rng, found = np.random.default_rng(7), list[Packed]()
        for i in range(self.count):
            k, n = (self.depth, self.columns) if i % 2 == 0 else (self.columns, self.depth)
            packed = rng.integers(0, 256, (n, k // self.block, self.block * self.bits // 8), np.uint8)
            scales = rng.uniform(0.5, 1.5, packed.shape[:2]) / (2.0**self.bits * 0.3 * k**0.5)
            found.append((packed, scales.astype(np.float16)))
        return found

    def model(self, weights: list[Packed]) -> ModelProto:
        """Return the chain with MatMulNBits."""
        nodes, tensors = list[NodeProto](), list[TensorProto]()
        for i, (packed, scales) in enumerate(weights):
            tensors += [numpy_helper.from_array(packed, f"q{i}"), numpy_helper.from_array(scales, f"s{i}")]
            names = [f"x{i}", f"q{i}", f"s{i}"]
            shape: dict[str, Any] = {
                "K": packed.shape[1] * self.block,
                "N": len(packed),
                "bits": self.bits,
                "block_size": self.block,
            }
            nodes.append(helper.make_node("MatMulNBits", names, [f"x{i + 1}"], domain="com.microsoft", **shape))
        x, y = (
            helper.make_tensor_value_info(name, TensorProto.FLOAT16, (self.rows, self.depth))
            for name in ("x0", f"x{self.count}")
        )
        graph = helper.make_graph(nodes, "chain", [x], [y], tensors)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def compiled(chain: Chain, data: bytes, **options: Any) -> tuple[dict[str, Executable], dict[str, Any]]:
    """Compile the chain with packed weights and with weights in fp16; return them, and the row so far."""
    row: dict[str, Any] = {"products": chain.count, "mb": round(chain.nbytes / 1e6, 3)}
    found: dict[str, Executable] = {}
    for name, disable in FORMS.items():
        executable = fusec.compile(data, precision="fp16", disable=disable, **options)
        assert isinstance(executable, Executable)
        steps = executable.compiled.program.steps
        row[f"{name}_steps"] = len(steps)
        row[f"{name}_packed_steps"] = sum(
            step.kind is Kind.KERNEL and isinstance(step.nodes[0].op, PackedMatMul) for step in steps
        )
        found[name] = executable
    return found, row


def simulate(case: str) -> dict[str, Any]:
    """Run a small chain in simulation, and return its row."""
    chain = Chain.of(case, small=True)
    weights = chain.weights()
    found, row = compiled(chain, chain.model(weights).SerializeToString(), target="h200", simulate=True)
    want = chain.x().astype(np.float64)
    for packed, scales in weights:
        codes = packed if chain.bits == 8 else np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1)
        wide = (codes - 2.0 ** (chain.bits - 1)) * scales[..., None].astype(np.float64)
        want = want @ wide.reshape(len(packed), -1).T
    errors: dict[str, float] = {}
    for name, executable in found.items():
        got = np.asarray(executable.run(None, {"x0": chain.x()})[0], np.float64)
        errors[name] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return {**row, "errors": errors}


def measure(case: str) -> dict[str, Any]:
    """Time a case on the GPU, and return its row."""
    import torch

    from benchmarks.common.torch_timing import captured, relative_l2, timed

    chain = Chain.of(case, small=False)
    weights = chain.weights()
    found, row = compiled(chain, chain.model(weights).SerializeToString(), tune="quick")
    x = torch.from_numpy(chain.x()).cuda()

    def dequantised(packed: Array, scales: Array) -> torch.Tensor:
        codes, factors = torch.from_numpy(packed).cuda(), torch.from_numpy(scales).cuda()
        if chain.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(2)
        return ((codes.float() - 2.0 ** (chain.bits - 1)) * factors.float()[..., None]).flatten(1)

    matrices, want = list[torch.Tensor](), x.double()
    for packed, scales in weights:
        wide = dequantised(packed, scales)
        want = want @ wide.double().T
        matrices.append(wide.half())

    def by_torch() -> torch.Tensor:
        y = x
        for w in matrices:
            y = torch.nn.functional.linear(y, w)
        return y

    errors: dict[str, float] = {}
    for name, executable in found.items():
        executable.hold_inputs()
        (y,) = executable.run(None, {"x0": x})
        executable.backend.finish()
        errors[name] = float(relative_l2(torch.from_dlpack(y).double(), want))
    replay, y = captured(by_torch)
    replay()
    torch.cuda.synchronize()
    errors["torch"] = float(relative_l2(y.double(), want))
    times = timed({**{name: executable.replay for name, executable in found.items()}, "torch": replay})
    return {**row, "errors": errors, **_rates(chain, times)}


def _rates(chain: Chain, times: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return times of one product in us, the rate at which packed weights are read, and its share of the limit."""
    target = device.detect()
    assert target is not None
    us = {name: 1000.0 * each["median_ms"] / chain.count for name, each in times.items()}
    rate = chain.nbytes / us["packed"] * 1e6
    return {
        "us": us,
        "times": times,
        "gb_per_s": rate / 1e9,
        "limit_gb_per_s": target.memory_bandwidth / 1e9,
        "share_of_limit": rate / target.memory_bandwidth,
        "fp16_over_packed": us["fp16"] / us["packed"],
        "torch_over_packed": us["torch"] / us["packed"],
    }


def main() -> int:
    options = parser(__doc__, NAME)
    options.add_argument("cases", nargs="*", default=CASES, help="ROWSxDEPTHxCOLUMNS:BITS:BLOCK")
    options.add_argument("--simulate", action="store_true", help="run small chains without a GPU, and time nothing")
    given = options.parse_args()
    for case in given.cases:
        row = {"case": case, **(simulate(case) if given.simulate else measure(case))}
        errors = "  ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
        packed = f"{row['packed_packed_steps']} of {row['products']} products packed"
        print(f"{case}  {packed}  errors: {errors}", flush=True)
        if not given.simulate:
            write_row(given.output, gpu_and_torch(), given.commit, row, KEYS[NAME])
            us = "  ".join(f"{name} {time:.2f} us" for name, time in row["us"].items())
            share, ratio = row["share_of_limit"], row["fp16_over_packed"]
            print(f"      {us}  {row['gb_per_s']:.0f} GB/s, {share:.0%} of the limit, {ratio:.2f}x fp16", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
