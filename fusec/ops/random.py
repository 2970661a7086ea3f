"""Draw random bits as a function of an explicit state, the same with NumPy and CuPy."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.spec import require, require_arity
from fusec.system.dataclass import dataclass

# The input of an imported model that gives a seed and the number of the call. A call may leave it out.
STATE_NAME = "fusec.random_state"
STATE_TYPE = TensorType((2,), DType.U64)

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True)
class RandomBits(Op):
    """32 random bits per element of `shape`, from state u64[2]: a seed and the number of the step.

    Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011): the key is the seed, the
    counter is (element // 4, stream, step). Ops with other streams draw other numbers in the same step.
    """

    shape: tuple[int, ...]
    stream: int = 0
    name: ClassVar[str] = "random_bits"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        state = operands[0]
        require(state.shape == (2,) and state.dtype is DType.U64, f"the state is {state}, not u64[2]")
        require(0 <= self.stream < 1 << 32, f"stream is {self.stream}")
        require(math.prod(self.shape) < 1 << 34, f"random bits of shape {list(self.shape)}: too many for one counter")
        return (TensorType(self.shape, DType.U32),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        state, size = operands[0], math.prod(self.shape)
        low = xp.uint64(0xFFFFFFFF)
        half = xp.uint64(32)
        key = [state[:1] & low, state[:1] >> half]
        index = xp.arange(-(-size // 4), dtype=xp.uint64)
        stream = xp.zeros_like(index) + xp.uint64(self.stream)
        counter = [index, stream, xp.zeros_like(index) + (state[1:] & low), xp.zeros_like(index) + (state[1:] >> half)]
        for number in range(_ROUNDS):  # all in u64, because it holds the product of two 32-bit numbers
            bumped = [(k + xp.uint64(number * w & 0xFFFFFFFF)) & low for k, w in zip(key, _WEYL, strict=True)]
            first, second = (counter[2 * i] * xp.uint64(m) for i, m in enumerate(_MULTIPLIERS))
            counter = [
                (second >> half) ^ counter[1] ^ bumped[0],
                second & low,
                (first >> half) ^ counter[3] ^ bumped[1],
                first & low,
            ]
        bits = xp.stack(counter, axis=1).reshape(-1)[:size].astype(xp.uint32)
        return (bits.reshape(self.shape),)
