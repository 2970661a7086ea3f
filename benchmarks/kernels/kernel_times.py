"""Time fusec's own kernels on this machine's GPU, and measure what each kernel family is worth to a model.

python -m benchmarks.kernels.kernel_times [PART OF A NAME ...]
Time each kernel with an empty L2 cache, and print the time its bytes take at the GPU's bandwidth. Writes
benchmarks/results/kernel_times.json.
python -m benchmarks.kernels.kernel_times --leave-one-out [--families a,b] [--seconds 100] [MODEL:BATCH[:FORM] ...]
Time models without one family (benchmarks/kernels/leave_one_out.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.attempt import add_limit
from benchmarks.common.cold_cache import cold_timer
from benchmarks.common.result_files import KEYS, gpu, parser, write_row
from benchmarks.kernels import leave_one_out
from benchmarks.kernels.kernel_cases import CASES
from fusec.gpu import device
from fusec.gpu.kernels import FAMILIES, GpuFigures, Kernel, find
from fusec.ir import Graph, TensorType, Value
from fusec.lowering.packing import code_bytes
from fusec.ops import Gather
from fusec.schedule.program import inputs_of, outputs_of
from fusec.targets.target import Target

NAME, LEAVE_ONE_OUT = "kernel_times.json", "leave_one_out.json"
RUNS = 20


def kernel_of(types: Sequence[TensorType], make: Callable[..., Any], target: Target) -> tuple[Kernel | None, int]:
    """Return the kernel of a case, and how many bytes it must read and write."""
    graph = Graph("case")
    made = make(graph, *(graph.add_input(f"x{i}", type) for i, type in enumerate(types)))
    graph.set_outputs([made] if isinstance(made, Value) else list(made))
    nodes = [node for node in graph.nodes if all(v.literal is None for v in node.results)]
    outputs = outputs_of(nodes)
    read = [v for v in inputs_of(nodes) if not any(isinstance(n.op, Gather) and n.operands[0] is v for n in nodes)]
    moved = sum(code_bytes(v.type.size, v.type.dtype) for v in (*read, *outputs))
    return find(nodes, outputs, GpuFigures.of(target)), moved


def main() -> int:
    options = parser(__doc__, LEAVE_ONE_OUT if "--leave-one-out" in sys.argv else NAME)
    options.add_argument("names", nargs="*", help="parts of the cases' names, or MODEL:BATCH[:FORM]")
    options.add_argument("--leave-one-out", action="store_true", help="measure models, and write the result file")
    options.add_argument("--families", default="", help="the families to leave out, separated by commas; all if empty")
    options.add_argument("--dry", action="store_true", help="list families of models; needs no GPU")
    add_limit(options)
    given = options.parse_args()
    if given.leave_one_out:
        families = tuple(name for name in given.families.split(",") if name)
        if unknown := set(families) - {family.__name__ for family in FAMILIES}:
            options.error(f"there are no families {', '.join(sorted(unknown))}")
        settings = leave_one_out.Settings(families, given.seconds, given.dry)
        return leave_one_out.main(given.names, settings, given.output, given.commit)
    time_kernels(given.names, given.output, given.commit)
    return 0


def time_kernels(wanted: Sequence[str], output: Path, commit: str) -> None:
    """Print and write the median time of each kernel, its limit, and the times of its variants.

    wanted: parts of the names of cases; all cases if empty.
    output: the result file.
    commit: the measured one.
    """
    from fusec.gpu.launch.kernel_launcher import Launcher
    from fusec.gpu.measure.random_inputs import RandomInputs

    target, launcher = device.detect(), Launcher()
    if target is None:
        raise SystemExit("this machine has no GPU")
    time_us = cold_timer(RUNS)
    print(f"{'':42} {'us':>8} {'limit':>8} {'share':>6}  us of other variants")
    for name, (types, make) in CASES.items():
        if wanted and not any(part in name for part in wanted):
            continue
        kernel, nbytes = kernel_of(types, make, target)
        assert kernel is not None, name
        launcher.compile((kernel, *kernel.others))
        running = [each for each in (kernel, *kernel.others) if launcher.runs(each)]
        us, *others = (time_us(launcher.bind(each, RandomInputs().memory)) for each in running)
        limit = 1e6 * nbytes / target.memory_bandwidth
        print(f"{name:42} {us:8.1f} {limit:8.1f} {limit / us:6.1%}  {' '.join(f'{t:.1f}' for t in others)}", flush=True)
        row = {"case": name, "us": us, "limit_us": limit, "variants_us": others}
        write_row(output, gpu(), commit, row, KEYS[NAME])


if __name__ == "__main__":
    sys.exit(main())
