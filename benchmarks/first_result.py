"""How long a model takes to its first result: compiled here and now, by a lock, or from a file made without a GPU.

Usage: python -m benchmarks.first_result make FOLDER [--pack] on any machine, then, with FOLDER carried to one that has
the GPU, python -m benchmarks.first_result load FOLDER. The model is ResNet-50 in fp16, batch 1; each filter has one
magnitude and random signs, so that it packs into a tenth for the way. Writes benchmarks/results/first_result.json.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import KEYS, RESULTS, ROOT, keep

FILE, PACKED, MODEL, ANSWERS, LOCK = "resnet50.fusec", "resnet50.fusec.xz", "resnet50.onnx", "answers.npz", "fusec.lock"
SIGNS_FROM = 4096  # elements of a weight
TOLERANCE = 2e-2  # of a whole model in fp16
GROUPS = ("model", "lock", "file")
# In a process of its own: seconds from its start to where fusec is imported, then to the result, and how it was got.
LOAD = """
import json, sys, time, warnings
import numpy as np
import fusec, fusec.driver, fusec.gpu.backend, cupy
from fusec.lockfile import toml_text as lock_text
from fusec.gpu.autotune import plan_bench as lab
path, answers, tune, lock, write, started = *sys.argv[1:6], float(sys.argv[6])
answers = np.load(answers)
name = answers["name"].item()
revive, counts = lab.revive, {"revived": 0, "built": 0}
build = lab.GpuPlanBench.build
def counted(blob, handle):
    counts["revived"] += 1
    return revive(blob, handle)
def built(self, graph, offer):
    counts["built"] += 1
    return build(self, graph, offer)
lab.revive, lab.GpuPlanBench.build = counted, built
imported = time.time() - started
begin = time.perf_counter()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    if path.endswith(".fusec"):
        net = fusec.load(path, tune=tune)
    else:
        net = fusec.compile(path, precision="fp16", tune=tune, lock=lock or None)
    loaded = time.perf_counter() - begin
    (got,) = net.run(None, {name: answers["x"]})
seconds = time.perf_counter() - begin
for _ in range(3):
    net.run(None, {name: answers["x"]})
if write:
    lock_text.write(write, net.lock())
want = answers["y"].astype(np.float64)
error = float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
whole, _ = net.time_us(15)
words = [str(w.message) for w in said if issubclass(w.category, UserWarning)]
print(json.dumps({"imports_s": imported, "load_s": loaded, "first_result_s": seconds, "error": error, **counts,
    "run_us": sorted(whole)[7], "device": net.device, "warnings": words}))
"""


def model() -> tuple[bytes, str, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The model in ONNX; the name of its input, an array for it, and the answer, by what the ops mean in fp32."""
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
    """Compile for a GPU that is not here. pack: what is carried is the packed file."""
    from fusec import driver
    from fusec.cli import lock as cli_lock
    from fusec.gpu import device

    if device.detect() is not None:
        raise SystemExit("this is for a machine without a GPU: hide it (CUDA_VISIBLE_DEVICES=)")
    data, *_ = model()
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    compiled = driver.build(data, target=target, precision="fp16")
    cli_lock.save(folder / FILE, [compiled], lambda stage, done, total: None)
    seconds = time.perf_counter() - begin
    file = (folder / FILE).read_bytes()
    print(f"{len(file) >> 20} MB in {seconds:.1f} s")
    if pack:
        (folder / PACKED).write_bytes(lzma.compress(file, preset=1))
        (folder / FILE).unlink()
        print(f"packed {(folder / PACKED).stat().st_size >> 20} MB")


def load(folder: Path, groups: list[str]) -> Iterator[dict[str, Any]]:
    """First results in fresh processes: for the first time, with empty caches, and again."""
    from fusec.artifacts import fusec_file
    from fusec.plans.plan_cache import PlanStore

    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
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

        if "model" in groups or "lock" in groups:  # which the first writes
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
    environment["CUPY_CACHE_DIR"] = str(cache / "cupy")  # nothing that NVRTC compiled before is found the first time
    files = [str(scratch / path), str(scratch / ANSWERS), tune, lock, str(scratch / LOCK) if write_lock else ""]
    command = [sys.executable, "-W", "ignore", "-c", LOAD, *files, str(time.time())]
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
    parser.add_argument("--pack", action="store_true", help="pack what is made")
    parser.add_argument("--only", default=",".join(GROUPS), help="of " + ", ".join(GROUPS))
    parser.add_argument("--commit", default="", help="where there is no history to ask")
    parser.add_argument("--result", type=Path, default=RESULTS / "first_result.json")
    given = parser.parse_args()
    if given.what == "make":
        make(given.folder, given.target, given.pack)
        return
    import cudnn
    import cupy

    machine = {"gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()}
    machine |= {"driver": cupy.cuda.runtime.driverGetVersion(), "cudnn": cudnn.backend_version()}
    machine |= {"model": "resnet50", "precision": "fp16", "batch": 1}
    for row in load(given.folder, given.only.split(",")):
        print(line(row), flush=True)
        keep(given.result, machine, given.commit, {**row, "cores": os.cpu_count()}, KEYS["first_result.json"])


if __name__ == "__main__":
    main()
