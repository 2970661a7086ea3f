"""Test inference in a Dask cluster of two processes, one of which is killed midway."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli.command import SHAPE, tiny
from cli.command import fusec as fusec_command
from helpers import assert_close
from segments.models import non_zero

from fusec.errors import ExecutionError, FusecError

pytest.importorskip("distributed")
from dask import bag
from dask.array import from_array
from distributed import Client
from distributed.system import MEMORY_LIMIT
from scale.page import run_examples

import fusec.dask

Array = np.ndarray[Any, Any]
Meaning = Callable[[Array], Array]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of Dask's own threads


def chunked(rows: Array, *chunks: int) -> Any:
    """Make a dask array. Dask declares that chunks are text."""
    sizes: Any = chunks
    return from_array(rows, chunks=sizes)


def processes(client: Client) -> set[int]:
    """Return the process of each worker. Dask declares what its asynchronous clients return."""
    found: Any = client.run(os.getpid)
    return set(found.values())


def address_of(client: Client) -> str:
    assert client.scheduler is not None and client.scheduler.address is not None
    return client.scheduler.address


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with fusec.dask.gpu_cluster(["cpu", "cpu"]) as cluster, Client(cluster) as client:
        yield client


def kill_once(x: Array, flag: str) -> Array:
    """Kill the worker of a chunk, the first time it is computed."""
    if x[0, 0] == -100 and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@pytest.mark.slow
def test_an_array_although_a_worker_is_killed(
    client: Client, model: Path, meaning: Meaning, rng: np.random.Generator, tmp_path: Path
) -> None:
    rows = rng.standard_normal((150, 6)).astype(np.float32)
    rows[75, 0] = -100
    array = chunked(rows, 15, 2).map_blocks(kill_once, str(tmp_path / "flag"))
    result = fusec.dask.map_array(array, model, target="cpu", pad=True)
    assert result.shape == (150, 6)
    assert result.dtype == np.float32
    before = processes(client)
    assert_close(result.compute(), meaning(rows), 1e-6)
    assert (tmp_path / "flag").exists()
    client.wait_for_workers(2)
    assert len(before & processes(client)) == 1, "one worker is new"


def test_a_bag(client: Client, model: Path, meaning: Meaning, rng: np.random.Generator) -> None:
    batches = rng.standard_normal((6, 4, 6)).astype(np.float32)
    given = [batches[0], (batches[1],), {"x": batches[2]}, *batches[3:]]
    results = fusec.dask.map_bag(bag.from_sequence(given, npartitions=3), model, target="cpu")
    assert_close(results.compute(), meaning(batches), 1e-6)


@pytest.mark.parametrize("ending", ["npy", "parquet"])
def test_a_folder(
    client: Client, model: Path, meaning: Meaning, rng: np.random.Generator, tmp_path: Path, ending: str
) -> None:
    from fusec.scale.row_files import read_rows, write_rows

    parts = {f"part{i}.{ending}": rng.standard_normal((4 + 4 * i, 6)).astype(np.float32) for i in range(3)}
    for name, rows in parts.items():
        write_rows(tmp_path / "in" / name, {"x": rows})
    written = fusec.dask.map_folder(tmp_path / "in", tmp_path / "out", model, target="cpu")
    assert [path.name for path in written] == list(parts)
    times = [path.stat().st_mtime_ns for path in written]
    renamed: Any = Renamed(fusec.compile(model, target="cpu"))
    for path in written:
        got = np.load(path) if ending == "npy" else read_rows(path, renamed)["z"]
        assert_close(got, meaning(parts[path.name]), 1e-6)
    again = fusec.dask.map_folder(tmp_path / "in", tmp_path / "out", model, target="cpu")
    assert [path.stat().st_mtime_ns for path in again] == times, "what is there is not computed again"


def test_a_folder_of_several_types_for_a_model_with_two_outputs(client: Client, tmp_path: Path) -> None:
    from fusec.scale.row_files import write_rows

    (tmp_path / "two.txt").write_text('graph "g" (%x: f32[4,6]) {\n %y = relu(%x)\n %z = neg(%x)\n return %y, %z\n}')
    rows = np.arange(-24, 24, dtype=np.float32).reshape(8, 6)
    for name in ("a.npy", "b.npz", "c.parquet"):
        write_rows(tmp_path / "in" / name, {"x": rows})
    written = fusec.dask.map_folder(tmp_path / "in", tmp_path / "out", tmp_path / "two.txt", target="cpu")
    assert written == [tmp_path / "out" / name for name in ("a.npz", "b.npz", "c.parquet")]
    assert sorted((tmp_path / "out").iterdir()) == written
    for path in written[:2]:
        with np.load(path) as got:
            np.testing.assert_array_equal(got["z"], -rows)


def test_folders_whose_results_could_replace_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text('graph "g" (%x: f32[4,6]) {\n %y = neg(%x)\n return %y\n}')
    rows = tmp_path / "in"
    with pytest.raises(FusecError, match=r"in: has no file of rows \(.npy, .npz, .parquet\)"):
        fusec.dask.map_folder(rows, tmp_path / "out", tmp_path / "m.txt")
    rows.mkdir()
    np.save(rows / "a.npy", np.ones((4, 6), np.float32))
    with pytest.raises(FusecError, match="in: holds the rows; results of the same names need another folder"):
        fusec.dask.map_folder(rows, tmp_path / "out" / ".." / "in", tmp_path / "m.txt")
    np.savez(rows / "a.npz", x=np.ones((4, 6), np.float32))
    with pytest.raises(FusecError, match=r"a.npy: a.npz is there, too; results of both may need one name"):
        fusec.dask.map_folder(rows, tmp_path / "out", tmp_path / "m.txt")


def test_a_folder_without_a_cluster(tmp_path: Path) -> None:
    """Dask's scheduler on this machine runs it, in the process of the caller."""
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", -np.ones((4, 6), np.float32))
    (tmp_path / "m.txt").write_text('graph "g" (%x: f32[4,6]) {\n %y = neg(%x)\n return %y\n}')
    code = "import fusec.dask; print(*fusec.dask.map_folder('in', 'out', 'm.txt', target='cpu'))"
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert told.stdout.strip() == str(tmp_path / "out" / "a.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "a.npy"), np.ones((4, 6), np.float32))


class Renamed:
    """Take the outputs of a model for inputs, to read them."""

    def __init__(self, model: Any):
        self.inputs = model.outputs


def test_a_worker_has_its_share_of_the_memory() -> None:
    """Dask's own limit is that of one core, which the libraries of a GPU and files of rows may exceed."""
    with fusec.dask.gpu_cluster(["cpu"]) as cluster:
        (worker,) = cluster.scheduler_info["workers"].values()
    assert worker["memory_limit"] == MEMORY_LIMIT
    assert worker["host"] == "127.0.0.1"


def test_errors_name_their_reason(client: Client, model: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    rows = chunked(rng.standard_normal((5, 6)).astype(np.float32), 5, 6)
    with pytest.raises(ExecutionError, match="the last batch of %x has 1 rows"):
        fusec.dask.map_array(rows, model, target="cpu").compute()
    (tmp_path / "two.txt").write_text('graph "g" (%x: f32[4], %w: f32[4]) {\n %y = add(%x, %w)\n return %y\n}')
    with pytest.raises(ExecutionError, match="has the inputs x, w; an array is for a model with one"):
        fusec.dask.map_array(rows, tmp_path / "two.txt", target="cpu")
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", np.ones((4, 6), np.float32))
    np.save(tmp_path / "in" / "b.npy", np.ones((4, 7), np.float32))
    with pytest.raises(ExecutionError, match=r"in/b.npy: input %x .*\[4, 7\]"):
        fusec.dask.map_folder(tmp_path / "in", tmp_path / "out", model, target="cpu")
    (tmp_path / "in" / "b.npy").write_bytes(b"no array")
    with pytest.raises(ExecutionError, match=r"in/b.npy: cannot be read"):
        fusec.dask.map_folder(tmp_path / "in", tmp_path / "out", model, target="cpu")


def test_fuzzing_is_spread(client: Client, tmp_path: Path) -> None:
    planted = f"{Path(__file__).parent.parent / 'testing' / 'planted.py'}:no_relu_and_mul"
    address = address_of(client)
    result = fusec_command(
        "fuzz", "--dask", address, "--property", planted, "--examples", 50, "--json", "--findings", tmp_path / "found"
    )
    assert result.exit_code == 1, result.stderr
    report = json.loads(result.stdout)
    assert report["examples"] == 50
    assert report["workers"] == 2
    findings = report["findings"]  # graphs of one fault that cannot be shrunk to each other
    assert any(finding["ops"] == {"relu": 1, "mul": 1} and finding["count"] > 1 for finding in findings)
    for finding in findings:
        assert {"relu", "mul"} <= finding["ops"].keys()
        assert (Path(finding["folder"]) / "graph.txt").exists()
        assert Path(finding["folder"]).parent == tmp_path / "found"
    refused = fusec_command("fuzz", "--dask", address, "--workers", 2)
    assert refused.exit_code == 2
    assert "--dask runs as many processes" in refused.stderr
    unreachable = fusec_command("fuzz", "--dask", "nonsense://1:2")
    assert unreachable.exit_code == 2
    assert "cannot be reached" in unreachable.stderr


@pytest.mark.cudnn
def test_targets_of_explain_are_spread(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny(tmp_path).parent)  # workers have another folder
    question = ("explain", "tiny.onnx", *SHAPE, "--target", "h200,t4,a100", "--must-fuse", "relu+sign", "--json")
    here, there = fusec_command(*question), fusec_command(*question, "--dask", address_of(client))
    assert there.exit_code == here.exit_code == 1
    assert json.loads(there.stdout) == json.loads(here.stdout)
    assert [each["target"] for each in json.loads(there.stdout)["targets"]] == ["h200", "t4", "a100"]


def test_errors_of_a_spread_explain(client: Client, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("no graph")
    address = address_of(client)
    bad = fusec_command("explain", tmp_path / "bad.txt", "--dask", address)
    assert bad.exit_code == 2
    assert bad.stderr == fusec_command("explain", tmp_path / "bad.txt").stderr
    onnx.save(non_zero().proto, tmp_path / "steps.onnx")
    split = fusec_command("explain", tmp_path / "steps.onnx", "--dask", address)
    assert split.exit_code == 2
    assert "has host steps, whose segments --dask does not spread" in split.stderr
    unreachable = fusec_command("explain", tmp_path / "steps.onnx", "--dask", "nonsense://1:2")
    assert unreachable.exit_code == 2
    assert "cannot be reached" in unreachable.stderr


@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meaning: Meaning) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    names = run_examples("Dask")
    assert_close(names["z"], meaning(np.concatenate(names["batches"])), 1e-6)
    assert_close(names["results"], meaning(names["batches"]), 1e-6)
    assert_close(names["y"], meaning(names["batches"][0]), 1e-6)
