"""Measure the time to a model's first result: compiled, compiled with a lock, or loaded from a file made without a GPU.

Usage: python -m benchmarks.compile_time.first_result make FOLDER [--pack] on a machine without a GPU. Then copy FOLDER
to a machine with one, and there: python -m benchmarks.compile_time.first_result load FOLDER. The model is ResNet-50 in
fp16, batch 1. Each filter has one magnitude and random signs, so that the packed file has a tenth of the size. Each
result is computed in a process of its own (benchmarks/compile_time/first_result_child.py). Writes
benchmarks/results/first_result.json.
"""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.result_files import KEYS, ROOT, compiler_caches, gpu, parser, write_row

FILE, PACKED, MODEL, ANSWERS, LOCK = "resnet50.fusec", "resnet50.fusec.xz", "resnet50.onnx", "answers.npz", "fusec.lock"
SIGNS_FROM = 4096  # elements of a weight that gets random signs, at least
TOLERANCE = 2e-2  # relative L2 of a whole model in fp16
GROUPS = ("model", "lock", "file")


def model() -> tuple[bytes, str, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the model as ONNX, the name of its input, an array for it, and the reference output in fp32."""
    import onnx
    from onnx import numpy_helper

    from examples.models import light, random_inputs, randomised
    from fusec import frontends
    from fusec.reference import evaluate

    made = randomised(onnx.load(light("resnet50")), seed=1)
    for tensor in made.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.size >= SIGNS_FROM:
            signs = np.where(array < 0, -1, 1) * array.std()
            tensor.CopyFrom(numpy_helper.from_array(signs.astype(array.dtype), tensor.name))
    ((name, x),) = random_inputs(made, seed=2).items()
    data = made.SerializeToString()
    (y,) = evaluate(frontends.load(data, None), {name: x}).values()
    return data, name, x, y


def make(folder: Path, target: str, pack: bool) -> None:
    """Compile the model for a GPU that this machine does not have.

    pack: write a packed file instead of a `.fusec` file.
    """
    from fusec import driver
    from fusec.artifacts import fusec_file
    from fusec.compiler.build_plans import build_plans
    from fusec.gpu import device

    if device.detect() is not None:
        raise SystemExit("`make` runs without a GPU, but this machine has one: hide it with CUDA_VISIBLE_DEVICES=")
    data, *_ = model()
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    compiled = driver.build(data, target=target, precision="fp16")
    built = build_plans([compiled], lambda stage, done, total: None)
    fusec_file.save(folder / FILE, [compiled], built.plans, kernels=built.kernels)
    seconds = time.perf_counter() - begin
    file = (folder / FILE).read_bytes()
    print(f"{len(file) >> 20} MB in {seconds:.1f} s")
    if pack:
        (folder / PACKED).write_bytes(lzma.compress(file, preset=1))
        (folder / FILE).unlink()
        print(f"packed {(folder / PACKED).stat().st_size >> 20} MB")


def load(folder: Path, groups: list[str]) -> Iterator[dict[str, Any]]:
    """Yield rows of first results: with empty caches, and again in the next process.

    groups: the starts to measure, of GROUPS.
    """
    from fusec.artifacts import fusec_file
    from fusec.plans.plan_cache import PlanStore

    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        data, name, x, y = model()
        np.savez(scratch / ANSWERS, name=np.array(name), x=x, y=y)
        (scratch / MODEL).write_bytes(data)

        def turns(group: str, tune: str, path: str, trusted: bool | None = None, lock: str = "") -> Iterator[Any]:
            cache = scratch / f"cache-{group}-{tune}-{trusted}"
            if trusted:
                fusec_file.trust(scratch / path, PlanStore(cache / "plans"))
            for turn in ("first", "again"):
                case = {"from": group, "trusted": trusted, "tune": tune, "turn": turn}
                yield {**case, **_loaded(scratch, path, tune, cache, lock, turn == "first" and group == "model")}

        if "model" in groups or "lock" in groups:  # the first process writes the lock
            yield from turns("model", "quick", MODEL)
        if "lock" in groups:
            yield from turns("lock", "quick", MODEL, lock=str(scratch / LOCK))
        if "model" in groups:
            yield from turns("model", "none", MODEL)
        if "file" in groups:
            plain = folder / FILE
            file = plain.read_bytes() if plain.exists() else lzma.decompress((folder / PACKED).read_bytes())
            (scratch / FILE).write_bytes(file)
            for trusted in (True, False):
                for tune in ("none", "quick"):
                    yield from turns("file", tune, FILE, trusted)


def line(row: dict[str, Any]) -> str:
    seconds = f"imports {row['imports_s']:.2f} s, load {row['load_s']:.2f}, first result {row['first_result_s']:.2f} s"
    plans = f"revived {row['revived']}, built {row['built']}"
    rest = f"error {row['error']:.1e}; then {row['run_us']:.0f} us; {'; '.join(row['warnings'])[:80]}"
    return f"{row['from']:5} trusted {row['trusted']!s:5} {row['tune']:5} {row['turn']}: {seconds}; {plans}; {rest}"


def _loaded(scratch: Path, path: str, tune: str, cache: Path, lock: str, write_lock: bool) -> dict[str, Any]:
    environment = {**os.environ, "FUSEC_CACHE": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the modules of an installed package are compiled
    environment |= compiler_caches(cache)  # so that NVRTC and the driver compile all kernels the first time
    files = [str(scratch / path), str(scratch / ANSWERS), tune, lock, str(scratch / LOCK) if write_lock else ""]
    child = ("-W", "ignore", "-m", "benchmarks.compile_time.first_result_child")
    command = [sys.executable, *child, *files, str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    row = json.loads(done.stdout.splitlines()[-1])
    if not row["error"] <= TOLERANCE:
        raise SystemExit(f"wrong result: {row}")
    return row


def main() -> None:
    options = parser(__doc__, "first_result.json")
    options.add_argument("what", choices=("make", "load"))
    options.add_argument("folder", type=Path)
    options.add_argument("--target", default="h200")
    options.add_argument("--pack", action="store_true", help="pack the file of `make`")
    options.add_argument("--only", default=",".join(GROUPS), help="starts to measure, of " + ", ".join(GROUPS))
    given = options.parse_args()
    if given.what == "make":
        make(given.folder, given.target, given.pack)
        return
    machine = {**gpu(), "model": "resnet50", "precision": "fp16", "batch": 1}
    for row in load(given.folder, given.only.split(",")):
        print(line(row), flush=True)
        row["cores"] = os.cpu_count()
        write_row(given.output, machine, given.commit, row, KEYS["first_result.json"])


if __name__ == "__main__":
    main()
