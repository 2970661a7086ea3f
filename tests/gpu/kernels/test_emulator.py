"""Test the emulator itself: threads that wait for each other, threads that cannot, and how many compilers it starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.kernels import emulator
from gpu.kernels.emulator import function, functions, needs_compiler

from fusec.gpu.kernels.codegen.kernel import Launch, prelude

pytestmark = needs_compiler
THREADS = 64
HEAD = 'extern "C" __global__ void __launch_bounds__(64) {}(const float* __restrict__ x, float* __restrict__ y) {{'
TURNED = """
  __shared__ float held[64];
  held[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
  __syncthreads();
  y[blockIdx.x * 64 + threadIdx.x] = held[63 - threadIdx.x];
}
"""
STUCK = """
  if (threadIdx.x < 7) __syncthreads();
  y[threadIdx.x] = x[threadIdx.x];
}
"""

AS_IF_GLOBAL = """
  RESIDENT(memory);
  const Pack<float, 4> own = {{x[threadIdx.x], 0.0f, 0.0f, 0.0f}};
  store_pack<float, 4>((float*)memory + threadIdx.x * 4, own);
  y[threadIdx.x] = ((float*)memory)[threadIdx.x * 4];
}
"""


def run(entry: str, call: Any, blocks: int = 3) -> None:
    x = np.arange(blocks * THREADS, dtype=np.float32)
    y = np.zeros_like(x)
    call(Launch(entry, "", blocks, THREADS, (), ()), [x.ctypes.data, y.ctypes.data])
    np.testing.assert_array_equal(y.reshape(blocks, THREADS), x.reshape(blocks, THREADS)[:, ::-1])


def test_threads_go_on_after_a_launch_that_got_stuck() -> None:
    found = functions(prelude() + HEAD.format("turned") + TURNED + HEAD.format("stuck") + STUCK)
    run("turned", found["turned"])
    for _ in range(2):
        with pytest.raises(AssertionError, match="wait at different barriers"):
            run("stuck", found["stuck"])
        run("turned", found["turned"])


def test_an_instruction_for_global_memory_does_not_take_shared_memory() -> None:
    found = functions(prelude() + HEAD.format("as_if_global") + AS_IF_GLOBAL)
    x, y = np.zeros(THREADS, np.float32), np.zeros(THREADS, np.float32)
    launch = Launch("as_if_global", "", 1, THREADS, (), (), resident_bytes=16 * THREADS)
    with pytest.raises(AssertionError, match="an instruction for global memory"):
        found["as_if_global"](launch, [x.ctypes.data, y.ctypes.data])


def test_sources_are_built_together_when_the_first_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def counted(code: str) -> dict[str, Any]:
        built.append(code)
        return functions(code)

    monkeypatch.setattr(emulator, "functions", counted)
    sources = {name: prelude() + HEAD.format(name) + TURNED for name in ("first", "second", "third")}
    made = {name: function(sources[name], name) for name in ("first", "second")}
    assert built == []
    for name in ("second", "first"):
        run(name, made[name])
    assert len(built) == 1
    run("third", function(sources["third"], "third"))
    assert len(built) == 2
    run("first", function(sources["first"], "first"))
    assert len(built) == 2
