"""How long a compiled model takes to its first result: made on a machine without a GPU, loaded on one that has it.

Usage: python benchmarks/first_result.py make FOLDER [--target h200] here, then, with FOLDER carried there,
python benchmarks/first_result.py load FOLDER. The model is ResNet-50 in fp16, batch 1; each filter has one magnitude
and random signs, so that 51 MB of weights pack into a tenth for the way. The answers come from onnxruntime in fp32.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402  # the repository must be on the path first
from machine import made  # noqa: E402

MODEL, PACKED, ANSWERS = "resnet50.fusec", "resnet50.fusec.xz", "answers.npz"
SIGNS_FROM = 4096  # elements of a weight
TOLERANCE = 2e-2  # of a whole model in fp16
# In a process of its own: seconds from its start to where fusec is imported, then to the result, and how it was got.
LOAD = """
import json, os, sys, time, warnings
import numpy as np
import fusec, fusec.driver, fusec.gpu.backend, cupy
from fusec.gpu import lab
path, answers, tune, started = sys.argv[1], np.load(sys.argv[2]), sys.argv[3], float(sys.argv[4])
revive, counts = lab.revive, {"revived": 0, "built": 0}
build = lab.GpuLaboratory.build
def counted(blob, handle):
    counts["revived"] += 1
    return revive(blob, handle)
def built(self, graph, offer):
    counts["built"] += 1
    return build(self, graph, offer)
lab.revive, lab.GpuLaboratory.build = counted, built
imported = time.time() - started
begin = time.perf_counter()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    net = fusec.load(path, tune=tune)
    loaded = time.perf_counter() - begin
    (got,) = net.run(None, {answers["name"].item(): answers["x"]})
seconds = time.perf_counter() - begin
for _ in range(3):
    net.run(None, {answers["name"].item(): answers["x"]})
want = answers["y"].astype(np.float64)
error = float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
whole, _ = net.time_us(30)
words = [str(w.message) for w in said if issubclass(w.category, UserWarning)]
print(json.dumps({"imports_s": imported, "load_s": loaded, "first_result_s": seconds, "error": error, **counts,
    "run_us": sorted(whole)[15], "device": net.device, "warnings": words}))
"""


def make(folder: Path, target: str) -> None:
    """Compile for a GPU that is not here, and say what the answers are."""
    import onnx
    import onnxruntime
    from models import light, random_inputs, randomised
    from onnx import numpy_helper

    from fusec import cli_lock, driver

    model = randomised(onnx.load(light("resnet50")), seed=1)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.size >= SIGNS_FROM:
            signs = np.where(array < 0, -1, 1) * array.std()
            tensor.CopyFrom(numpy_helper.from_array(signs.astype(array.dtype), tensor.name))
    ((name, x),) = random_inputs(model, seed=2).items()
    data = model.SerializeToString()
    (y,) = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {name: x})
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    compiled = driver.build(data, target=target, precision="fp16")
    cli_lock.save(folder / MODEL, [compiled], lambda stage, done, total: None)
    seconds = time.perf_counter() - begin
    np.savez(folder / ANSWERS, name=np.array(name), x=x, y=y)
    file = (folder / MODEL).read_bytes()
    (folder / PACKED).write_bytes(lzma.compress(file, preset=1))
    print(f"{len(file) >> 20} MB in {seconds:.1f} s, packed {(folder / PACKED).stat().st_size >> 20} MB")


def load(folder: Path) -> list[dict[str, Any]]:
    """Load it in fresh processes: trusted or not, for the first time on this machine or again."""
    from fusec import artifact
    from fusec.plan_store import PlanStore

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / MODEL
        path.write_bytes(lzma.decompress((folder / PACKED).read_bytes()))
        for trusted in (True, False):
            cache = Path(scratch) / f"cache-{trusted}"
            if trusted:
                artifact.trust(path, PlanStore(cache / "plans"))
            for tune, turn in (("quick", "first"), ("quick", "again"), ("none", "first"), ("none", "again")):
                row = {"trusted": trusted, "tune": tune, "turn": turn, **_loaded(path, folder / ANSWERS, tune, cache)}
                rows.append(row)
                print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    seconds = f"imports {row['imports_s']:.2f} s, load {row['load_s']:.2f}, first result {row['first_result_s']:.2f} s"
    plans = f"revived {row['revived']}, built {row['built']}"
    rest = f"error {row['error']:.1e}; then {row['run_us']:.0f} us; {'; '.join(row['warnings'])[:100]}"
    return f"trusted {row['trusted']!s:5} {row['tune']:5} {row['turn']:5}: {seconds}; {plans}; {rest}"


def _loaded(path: Path, answers: Path, tune: str, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "FUSEC_CACHE": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment["CUPY_CACHE_DIR"] = str(cache / "cupy")  # nothing that NVRTC compiled before is found the first time
    command = [sys.executable, "-W", "ignore", "-c", LOAD, str(path), str(answers), tune, str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    row = json.loads(done.stdout.splitlines()[-1])
    if not row["error"] <= TOLERANCE:
        raise SystemExit(f"wrong answer: {row}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("make", "load"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--commit", default="", help="where there is no history to ask")
    parser.add_argument("--result", type=Path, default=ROOT / "benchmarks" / "results" / "first_result.json")
    given = parser.parse_args()
    if given.what == "make":
        make(given.folder, given.target)
        return
    rows = load(given.folder)
    import cudnn
    import cupy

    machine = {"driver": cupy.cuda.runtime.driverGetVersion(), "cudnn": cudnn.backend_version()}
    about = {"model": "resnet50", "precision": "fp16", "batch": 1, **machine, **made(given.commit)}
    given.result.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
