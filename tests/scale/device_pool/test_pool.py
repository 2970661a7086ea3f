"""Test the pool: order, back-pressure, workers that die or hang, errors, and the end of all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_close, one_program
from scale.device_pool.faulty_worker import HANGS, KILLS, KILLS_ONCE, SLOW
from scale.page import run_examples

import fusec
from fusec.errors import ExecutionError, FusecError, ModelError, TargetError
from fusec.scale.model_recipe import ModelRecipe
from fusec.text import parse

Array = np.ndarray[Any, Any]
Meaning = Callable[[Array], Array]
TWO = ("cpu", "cpu")


def marked(x: Array, mark: float) -> Array:
    """Return a batch that has an effect on a faulty worker."""
    x = x.copy()
    x.flat[0] = mark
    return x


def test_results_come_in_order_and_batches_are_taken_as_there_is_room(
    model: Path, meaning: Meaning, rng: np.random.Generator
) -> None:
    batches = rng.standard_normal((60, 4, 6)).astype(np.float32)
    taken = 0

    def source() -> Iterator[Array]:
        nonlocal taken
        for batch in batches:
            taken += 1
            yield batch

    with fusec.pool(model, devices=TWO) as pool:
        assert pool.devices == TWO
        assert repr(pool) == "<fusec.DevicePool of 2 workers on cpu, cpu>"
        number = -1
        for number, result in enumerate(pool.map(source())):
            assert_close(result, meaning(batches[number]), 1e-6)
            assert taken <= number + 1 + 12, "it ran ahead of its consumer"
        assert number == 59
        assert_close(pool(batches[0]), meaning(batches[0]), 1e-6)
        assert_close(pool(x=batches[1]), meaning(batches[1]), 1e-6)
        named = list(pool.map([{"x": batches[2]}, (batches[3],)]))
        assert_close(named, meaning(batches[2:4]), 1e-6)


@pytest.mark.usefixtures("faulty")
def test_nothing_is_lost_when_workers_are_killed(model: Path, meaning: Meaning, rng: np.random.Generator) -> None:
    """One is killed by its batch, which then runs once more, and one from outside."""
    batches = rng.standard_normal((40, 4, 6)).astype(np.float32)
    batches[7] = marked(batches[7], KILLS_ONCE)
    with fusec.pool(model, devices=TWO) as pool:
        results: list[Array] = []
        for result in pool.map(batches):
            results.append(result)
            if len(results) == 20:
                os.kill(pool.pids[0], signal.SIGKILL)
        assert pool.replaced == 2
    assert_close(results, meaning(batches), 1e-6)


@pytest.mark.usefixtures("faulty")
def test_a_batch_that_ends_two_workers_is_one_error(model: Path, meaning: Meaning, rng: np.random.Generator) -> None:
    good = rng.standard_normal((4, 6)).astype(np.float32)
    with fusec.pool(model, devices="cpu") as pool:
        before, bad, after = pool.submit(good), pool.submit(marked(good, KILLS)), pool.submit(good)
        with pytest.raises(ExecutionError, match=r"batch 1: 2 workers ended while they ran it: .*SIGKILL"):
            bad.result()
        assert_close(before.result(), meaning(good), 1e-6)
        assert_close(after.result(), meaning(good), 1e-6)
        assert pool.replaced == 2
        assert_close(pool(good), meaning(good), 1e-6)


@pytest.mark.usefixtures("faulty")
def test_a_worker_without_an_answer_counts_as_dead(model: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6)).astype(np.float32)
    with fusec.pool(model, devices="cpu", timeout_s=0.5) as pool:
        pool(x)
        with pytest.raises(ExecutionError, match=r"2 workers ended .* no answer"):
            pool(marked(x, HANGS))


@pytest.mark.usefixtures("faulty")
def test_a_closed_pool_fails_what_it_has_not_done(model: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6)).astype(np.float32)
    pool = fusec.pool(model, devices="cpu", depth=1)
    futures = [pool.submit(marked(x, SLOW)) for _ in range(2)]
    pool.close()
    for future in futures:
        with pytest.raises(ExecutionError, match="the pool is closed"):
            future.result(timeout=10)
    with pytest.raises(ExecutionError, match="the pool is closed"):
        pool(x)


def test_a_bad_batch_is_an_error_of_its_own(model: Path, meaning: Meaning, rng: np.random.Generator) -> None:
    good = rng.standard_normal((4, 6)).astype(np.float32)
    with fusec.pool(model, devices="cpu") as pool:
        with pytest.raises(ExecutionError, match=r"batch 0: input %x has shape \[4, 6\], the array \[3, 6\]"):
            pool(good[:3])
        with pytest.raises(ExecutionError, match="no input %q"):
            pool(q=good)
        with pytest.raises(ExecutionError, match="2 arrays for 1 inputs"):
            pool(good, good)
        with pytest.raises(ExecutionError, match="element type <U1"):
            pool(np.array(["a"]))
        assert_close(pool(good), meaning(good), 1e-6)
        assert pool.replaced == 0


def test_models_that_cannot_be_loaded(tmp_path: Path, model: Path) -> None:
    (tmp_path / "bad.txt").write_text("graph oops")
    with pytest.raises(ExecutionError, match=r"the worker on cpu: .*bad.txt"):
        fusec.pool(tmp_path / "bad.txt", devices="cpu")
    with pytest.raises(ModelError, match="no such file"):
        fusec.pool(tmp_path / "missing.onnx", devices="cpu")
    with pytest.raises(ModelError, match="give its path, not Graph"):
        fusec.pool(parse(model.read_text()), devices="cpu")  # type: ignore[arg-type]  # the error under test
    with pytest.raises(FusecError, match=r"speed: no option of fusec.compile"):
        ModelRecipe.of(model, {"speed": 3}).executable()
    with pytest.raises(FusecError, match="options for workers are numbers"):
        fusec.pool(model, devices="cpu", progress=print)
    with pytest.raises(TargetError, match="none of: all"):
        fusec.pool(model, devices="tpu")
    with pytest.raises(ExecutionError, match="depth is 0"):
        fusec.pool(model, devices="cpu", depth=0)


def test_a_compiled_file_and_types_that_numpy_lacks(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "two.fusec"
    text = 'graph "g" (%x: bf16[8,16], %n: i64[3]) {\n %y = relu(%x)\n %m = neg(%n)\n return %y, %m\n}'
    fusec.save(str(path), [one_program(fusec.compile(parse(text), target="cpu")).compiled], {})
    x = rng.standard_normal((8, 16)).astype(ml_dtypes.bfloat16)
    with fusec.pool(path, devices=["cpu"]) as pool:
        y, m = pool(x, np.arange(3))
    assert y.dtype == x.dtype
    assert_close(y, np.maximum(x.astype(np.float64), 0), 0)
    assert m.tolist() == [0, -1, -2]


def test_batches_of_several_sizes(tmp_path: Path, rng: np.random.Generator) -> None:
    """The shared memory grows with them."""
    from onnx import TensorProto, helper, save

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1000]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "g", [x], [y])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "m.onnx")
    batches = [rng.standard_normal((n, 1000)).astype(np.float32) for n in (3, 700, 1, 700)]
    with fusec.pool(tmp_path / "m.onnx", devices=["cpu"], shapes={"n": "1..1000"}) as pool:
        for batch, result in zip(batches, pool.map(batches), strict=True):
            assert_close(result, np.tanh(batch.astype(np.float64)), 1e-6)


def test_workers_end_with_their_parent(model: Path) -> None:
    code = f"""
import fusec
pool = fusec.pool({str(model)!r}, devices=["cpu", "cpu"])
print(*pool.pids, flush=True)
input()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    end = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meaning: Meaning) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    names = run_examples("All GPUs of one machine")
    for results in (names["results"], names["results_without_copies"]):
        assert_close(results, meaning(names["batches"]), 1e-6)
    assert_close(names["y"], meaning(names["x"]), 1e-6)
