"""Time products of few rows with packed weights against the same products in fp16, by fusec and by torch, on one GPU.

Usage, with a GPU and torch: python -m benchmarks.kernels.packed_products [ROWSxDEPTHxCOLUMNS:BITS:BLOCK ...]
A case is a chain of products, there and back, whose weights together exceed the L2 cache: as in a decoder, each product
reads its weights from memory. Times are of one product, within the captured graph of the chain. The limit is that of
the bytes of weights and scales. Writes benchmarks/results/packed_products.json. Each figure is printed, and its row
written, as soon as it is known: the kernel without tuning first, then torch, then what needs tuning. `--seconds` stops
the run. With --simulate, small chains run in simulation on any machine: results are checked, and nothing is timed or
written.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import fusec
from benchmarks.common.attempt import Attempt, TooLongError, add_limit, within
from benchmarks.common.result_files import parser
from benchmarks.common.step_pairs import named_steps, step_pairs, table
from fusec.diagnostics.step_times import measure
from fusec.gpu import device
from fusec.ops import PackedMatMul
from fusec.runtime import Executable
from fusec.schedule.program import Kind

# torch is imported within functions, because a run in simulation does not need it.

NAME = "packed_products.json"
CASES = [
    *("1x4096x14336:4:32", "16x4096x14336:4:32", "1x4096x14336:8:32", "1x4096x14336:4:128", "1x4096x4096:4:32"),
    *("4x4096x14336:4:32", "8x4096x14336:4:32"),
]
CHAIN_BYTES = 1 << 28  # of weights, about: several times the L2 cache
FORMS: dict[str, dict[str, Any]] = {  # options of fusec.compile, in the order of compile times
    "untuned": {"tune": "none"},
    "packed": {"tune": "quick"},
    "fp16": {"tune": "quick", "disable": ("keep_packed_weights",)},
}
Array = np.ndarray[Any, Any]
Packed = tuple[Array, Array]  # bytes [columns, blocks, bytes of a block], and scales [columns, blocks]


@dataclass(frozen=True)
class Chain:
    """Products x @ w1 @ w2 …, where each product with [depth, columns] is followed by one with [columns, depth].

    bits: bits of an integer weight. block: weights along the depth that share a scale of 16 bits.
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
            # numbers of mean 0: a common mean would add up over the chain until it overflows
            codes = rng.integers(1, 1 << self.bits, (n, k // self.block, self.block), np.uint8)
            packed = codes if self.bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
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
            node = helper.make_node("MatMulNBits", names, [f"x{i + 1}"], f"product{i}", domain="com.microsoft", **shape)
            nodes.append(node)
        x, y = (
            helper.make_tensor_value_info(name, TensorProto.FLOAT16, (self.rows, self.depth))
            for name in ("x0", f"x{self.count}")
        )
        graph = helper.make_graph(nodes, "chain", [x], [y], tensors)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def compiled(form: str, data: bytes, row: dict[str, Any], **options: Any) -> Executable:
    """Compile the chain in one form, and add to the row how many steps it has and how many of them are packed."""
    executable = fusec.compile(data, precision="fp16", **FORMS[form], **options)
    assert isinstance(executable, Executable)
    steps = executable.compiled.program.steps
    row[f"{form}_steps"] = len(steps)
    row[f"{form}_packed_steps"] = sum(
        step.kind is Kind.KERNEL and isinstance(step.nodes[0].op, PackedMatMul) for step in steps
    )
    return executable


def described(case: str, chain: Chain) -> dict[str, Any]:
    """Return what is known of a row before anything runs."""
    return {"case": case, "products": chain.count, "mb": round(chain.nbytes / 1e6, 3), "errors": {}, "us": {}}


def simulate(case: str) -> dict[str, Any]:
    """Run a small chain in simulation, and return its row."""
    chain = Chain.of(case, small=True)
    weights = chain.weights()
    row, data = described(case, chain), chain.model(weights).SerializeToString()
    want = chain.x().astype(np.float64)
    for packed, scales in weights:
        codes = packed if chain.bits == 8 else np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1)
        wide = (codes - 2.0 ** (chain.bits - 1)) * scales[..., None].astype(np.float64)
        want = want @ wide.reshape(len(packed), -1).T
    for form in FORMS:
        executable = compiled(form, data, row, target="h200", simulate=True)
        got = np.asarray(executable.run(None, {"x0": chain.x()})[0], np.float64)
        row["errors"][form] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return row


class Measurement:
    """The figures of one case on the GPU, each printed when it is known.

    row: what is known so far.
    """

    def __init__(self, case: str, attempt: Attempt):
        import torch

        self.attempt, self.chain = attempt, Chain.of(case, small=False)
        self.row = described(case, self.chain)
        self._weights = self.chain.weights()
        self._data = self.chain.model(self._weights).SerializeToString()
        self._x = torch.from_numpy(self.chain.x()).cuda()
        self._want, self._replays, self._found = self._x.double(), dict[str, Any](), dict[str, Executable]()
        attempt.say(f"{case}: {self.chain.count} products of {self.row['mb']} MB")

    def run(self) -> None:
        """Measure all forms alone, then in turns, then step by step."""
        from benchmarks.common.torch_timing import timed

        matrices = self._matrices()
        self._fusec("untuned")
        self._torch(matrices)
        self._fusec("packed")
        self._fusec("fp16")
        self.row["times"] = timed(self._replays)
        for name, each in self.row["times"].items():
            self._tell(name, each["median_ms"])
        sides = [named_steps(e, measure(e, {"x0": self._x})) for e in map(self._found.__getitem__, ("packed", "fp16"))]
        pairs = step_pairs(*sides)
        self.row["pairs"] = [pair.to_json("packed", "fp16") for pair in pairs]
        self.attempt.keep(self.row)
        self.attempt.say("steps\n" + table(pairs, "packed", "fp16", 4))

    def _matrices(self) -> list[Any]:
        """Dequantise the weights, and compute the result in fp64."""
        import torch

        found = list[Any]()
        for packed, scales in self._weights:
            codes, factors = torch.from_numpy(packed).cuda(), torch.from_numpy(scales).cuda()
            if self.chain.bits == 4:
                codes = torch.stack([codes & 15, codes >> 4], -1).flatten(2)
            wide = ((codes.float() - 2.0 ** (self.chain.bits - 1)) * factors.float()[..., None]).flatten(1)
            self._want = self._want @ wide.double().T
            found.append(wide.half())
        return found

    def _fusec(self, form: str) -> None:
        import torch

        executable = compiled(form, self._data, self.row)
        executable.hold_inputs()
        (y,) = executable.run(None, {"x0": self._x})
        executable.backend.finish()
        self._found[form] = executable
        steps = f"{self.row[f'{form}_packed_steps']} of {self.row[f'{form}_steps']} steps packed"
        self._alone(form, executable.replay, torch.from_dlpack(y), steps)

    def _torch(self, matrices: list[Any]) -> None:
        import torch

        from benchmarks.common.torch_timing import captured

        def run() -> torch.Tensor:
            y = self._x
            for w in matrices:
                y = torch.nn.functional.linear(y, w)
            return y

        replay, y = captured(run)
        self._alone("torch", replay, y, "fp16, eager")

    def _alone(self, name: str, replay: Any, y: Any, about: str) -> None:
        """Time a form by itself."""
        from benchmarks.common.torch_timing import relative_l2, timed

        self._replays[name] = replay
        median_ms = timed({name: replay}, rounds=5)[name]["median_ms"]
        self.row["errors"][name] = relative_l2(y, self._want)
        self._tell(name, median_ms, f"; {about}, error {self.row['errors'][name]:.1e}")
        self.attempt.keep(self.row)

    def _tell(self, name: str, median_ms: float, about: str = "") -> None:
        """Print the time of a product, its share of the limit, and its ratio to fp16."""
        us = self.row["us"]
        us[name] = 1000.0 * median_ms / self.chain.count
        self.row |= rates(self.chain.nbytes, us)
        text = f"{name}: {us[name]:.2f} us a product"
        if name in ("untuned", "packed"):
            self.row["share_of_limit"] = share = self.row["limit_us"] / us[name]
            text += f", {share:.0%} of the limit of {self.row['limit_us']:.2f} us"
        if "fp16_over_packed" in self.row:
            text += f"; fp16 takes {self.row['fp16_over_packed']:.2f}x, torch {self.row['torch_over_packed']:.2f}x"
        self.attempt.say(text + about)


def rates(nbytes: int, us: dict[str, float]) -> dict[str, float]:
    """Return the limit of a product in us, and the ratios of those times that are known."""
    target = device.detect()
    assert target is not None
    found = {"limit_us": nbytes / target.memory_bandwidth * 1e6, "limit_gb_per_s": target.memory_bandwidth / 1e9}
    packed = us.get("packed", us.get("untuned"))
    return found | {f"{name}_over_packed": us[name] / packed for name in ("fp16", "torch") if name in us and packed}


def main() -> int:
    options = parser(__doc__, NAME)
    options.add_argument("cases", nargs="*", default=CASES, help="ROWSxDEPTHxCOLUMNS:BITS:BLOCK")
    options.add_argument("--simulate", action="store_true", help="run small chains without a GPU, and time nothing")
    add_limit(options)
    given = options.parse_args()
    attempt = Attempt(given.output, given.commit)
    try:
        with within(given.seconds):
            for case in given.cases:
                if not given.simulate:
                    Measurement(case, attempt).run()
                    continue
                row = simulate(case)
                errors = "  ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
                attempt.say(
                    f"{case}  {row['packed_packed_steps']} of {row['products']} products packed  errors: {errors}"
                )
    except TooLongError as reason:
        attempt.say(f"stopped: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
