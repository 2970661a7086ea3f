"""Test that workers that train together compute what one worker computes with the whole batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import assert_close, one_program

import fusec
from examples.toy_framework import train_parallel
from fusec import training
from fusec.errors import ExecutionError, ModelError
from fusec.ir import DType, TensorType
from fusec.scale.communicator import Communicator, threads
from fusec.scale.training.state_blocks import ALIGNMENT, blocks

Array = np.ndarray[Any, Any]
RATE = np.float32(1e-2)


def network(batch: int, seed: int = 0, scale: float = 2.0**8) -> fusec.Builder:
    """A convolution in 16 bits with master weights, a linear layer, and AdamW with loss scaling."""
    b, rng = fusec.Builder(), np.random.default_rng(seed)
    x, t, rate = b.input("x", (batch, 3, 6, 6)), b.input("t", (batch, 5)), b.input("rate", ())
    w = b.parameter("w", rng.standard_normal((8, 3, 3, 3)).astype(np.float32))
    c = b.parameter("c", np.zeros(8, np.float32))
    v = b.parameter("v", rng.standard_normal((8, 5)).astype(np.float32))
    y = (b.conv(x.astype("f16"), b.copy(w, "f16"), 1, 1).astype("f32").relu().mean((2, 3)) + c) @ v
    loss = ((y - t) * (y - t)).mean()
    gradients, finite = training.scaled_backward(loss, [w, c, v], start=scale)
    training.adamw(b, [w, c, v], gradients, rate, keep=finite)
    b.output(loss=loss, scale=b.parameter("untouched", np.float32(3)) * 2)
    return b


def in_threads(count: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """Run each worker in a thread; return what each returned."""
    found: list[Any] = [None] * count

    def run(communicator: Communicator) -> None:
        try:
            found[communicator.rank] = work(communicator)
        except BaseException as error:  # noqa: BLE001  # raised below
            found[communicator.rank] = error
            communicator._barrier.abort()  # type: ignore[attr-defined]  # so that the others do not wait

    workers = [threading.Thread(target=run, args=(communicator,)) for communicator in threads(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for error in found:
        if isinstance(error, BaseException) and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return found


@pytest.mark.parametrize(
    ("target", "workers", "overlap"), [("cpu", 2, False), ("cpu", 4, True), ("h200", 2, False), ("h200", 2, True)]
)
def test_workers_compute_what_one_does(target: str, workers: int, overlap: bool, rng: np.random.Generator) -> None:
    """Each begins with other weights, but all take those of the first."""
    options: dict[str, Any] = {"target": target, "simulate": target != "cpu"}
    xs = rng.standard_normal((5, 8, 3, 6, 6)).astype(np.float32)
    ts = rng.standard_normal((5, 8, 5)).astype(np.float32)
    whole = one_program(fusec.compile(network(8), **options))
    wanted = [float(whole.step(x=x, t=t, rate=RATE)[0]) for x, t in zip(xs, ts, strict=True)]
    part = 8 // workers

    def train(communicator: Communicator) -> tuple[list[float], fusec.DataParallel]:
        made = network(part, seed=communicator.rank)
        step = fusec.data_parallel(made, communicator, bucket_bytes=1024, overlap=overlap, **options)
        assert step.early > 0 if overlap else step.early == 0
        mine = slice(part * communicator.rank, part * (communicator.rank + 1))
        losses = [step.average(step.step(x=x[mine], t=t[mine], rate=RATE)[0]) for x, t in zip(xs, ts, strict=True)]
        return losses, step

    found = in_threads(workers, train)
    for losses, step in found:
        assert_close(losses, wanted, 2e-5)
        assert [bucket.memory.dtype for bucket in step.buckets] == [np.float32, np.float16]
        for name in ("w", "c", "v", "w as f16", "v.mean"):
            assert_close(step.value(name), whole.value(name), 2e-3 if "f16" in name else 1e-4)
            assert np.array_equal(step.value(name), found[0][1].value(name)), "workers are equal to the last bit"


@pytest.mark.slow
def test_the_toy_framework_trains_in_parallel() -> None:
    first, second = in_threads(2, lambda communicator: train_parallel.train(communicator, 1))
    assert first == second > 0.3


def test_a_gradient_that_is_not_finite_stops_all_workers(rng: np.random.Generator) -> None:
    x, t = rng.standard_normal((4, 3, 6, 6)).astype(np.float32), rng.standard_normal((4, 5)).astype(np.float32)

    def train(communicator: Communicator) -> tuple[Array, Array]:
        step = fusec.data_parallel(network(4), communicator, target="cpu")
        before = step.value("w")
        step.step(x=np.full_like(x, 1e30) if communicator.rank else x, t=t, rate=RATE)
        assert np.array_equal(step.value("w"), before)
        return step.value("loss.scale"), before

    assert [float(scale) for scale, _ in in_threads(2, train)] == [2.0**7, 2.0**7]


def test_statistics_and_random_numbers_are_each_workers_own(rng: np.random.Generator) -> None:
    xs = rng.standard_normal((2, 16, 4)).astype(np.float32) * 3 + 1

    def train(communicator: Communicator) -> tuple[Array, Array, Array]:
        b = fusec.Builder()
        x, w = b.input("x", (16, 4)), b.parameter("w", np.ones(4, np.float32))
        mean, random = b.parameter("mean", np.zeros(4, np.float32)), b.parameter("random", np.array([7, 0], np.uint64))
        y = b.dropout(x * w, 0.5, random)
        loss = (y * y).mean()
        b.update(mean, mean * 0.5 + x.mean(0) * 0.5)
        b.update(random, random + np.array([0, 1], np.uint64))
        training.sgd(b, [w], fusec.backward(loss, [w]), 0.1)
        b.output(y=y)
        step = fusec.data_parallel(b, communicator, target="cpu")
        y = step.step(x=xs[0])
        step.step(x=xs[communicator.rank])
        own = step.value("mean")
        step.average_statistics()
        assert step.value("random")[1] == 2
        return y, own, step.value("mean")

    (y0, own0, mean0), (y1, own1, mean1) = in_threads(2, train)
    assert not np.array_equal(y0 == 0, y1 == 0), "they drop other elements"
    assert not np.array_equal(own0, own1)
    assert_close(mean0, (own0 + own1) / 2, 1e-6)
    assert np.array_equal(mean0, mean1)


def test_the_host_does_not_wait_for_the_update(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads and writes state alone, so the host can queue the next step meanwhile."""
    b = fusec.Builder()
    x, w = b.input("x", (4, 3)), b.parameter("w", np.ones(3, np.float32))
    loss = (x * w).mean()
    training.sgd(b, [w], fusec.backward(loss, [w]), 0.1)
    b.output(loss=loss)
    step = fusec.data_parallel(b, target="cpu")
    waits: list[int] = []
    for number, program in enumerate(step.programs):
        monkeypatch.setattr(program.backend, "finish", partial(waits.append, number), raising=True)
    for _ in range(2):  # the first run waits after each step, to name one that fails
        waits.clear()
        step.step(x=rng.standard_normal((4, 3)).astype(np.float32))
    assert waits == [0]


def test_an_update_that_would_differ_between_workers_is_refused() -> None:
    b = fusec.Builder()
    x, w = b.input("x", (4, 3)), b.parameter("w", np.ones(3, np.float32))
    loss = (x * w).mean()
    training.sgd(b, [w], fusec.backward(loss, [w]), loss * 0.1)
    b.output(loss=loss)
    with pytest.raises(ModelError, match=r"the update reads .* which depends on the batch but is no gradient"):
        fusec.data_parallel(b, target="cpu")


def test_arguments_are_checked() -> None:
    b = fusec.Builder()
    b.output(y=b.input("x", (4, 3)) * 2.0)
    with pytest.raises(ModelError, match="needs gradients of parameters"):
        fusec.data_parallel(b, target="cpu")
    step = fusec.data_parallel(network(4), target="cpu")
    with pytest.raises(ExecutionError, match="no input %y"):
        step.step(y=np.zeros(3))
    with pytest.raises(ExecutionError, match="%x is no state"):
        step.bind(x=np.zeros(3))
    with pytest.raises(ExecutionError, match="only the steps of a program with state run in order"):
        one_program(fusec.compile(b, target="cpu")).after_steps({})
    with pytest.raises(ExecutionError, match=r"state %v is f32\[8,5\], and the memory float32\[3\]"):
        step.programs[0].place_state({"v": np.zeros(3, np.float32)})


def test_blocks_are_aligned_and_of_one_type() -> None:
    types = {"a": TensorType((3,), DType.F32), "b": TensorType((200,), DType.F16), "c": TensorType((300,), DType.F32)}
    made = blocks(np, list(types.items()), 1500)
    assert [list(block.parts) for block in made] == [["a"], ["b"], ["c"]]
    (f32, f16) = blocks(np, list(types.items()))
    assert list(f32.parts) == ["a", "c"]
    assert f16.memory.dtype == np.float16
    f32.memory[:] = 1
    assert f32.parts["c"].sum() == 300
    starts = [part.ctypes.data - f32.memory.ctypes.data for part in f32.parts.values()]
    assert starts == [0, ALIGNMENT]
