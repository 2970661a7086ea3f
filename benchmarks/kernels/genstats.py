"""Time ResNet-50's convolutions alone and with cuDNN's genstats, which computes statistics for the next batch norm.

Usage: python -m benchmarks.kernels.genstats [--dry] [--commit HASH]
`--dry` needs no GPU: it lists the plans that cuDNN offers, and builds those with statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.cold_cache import cold_timer
from benchmarks.common.result_files import KEYS, gpu_and_torch, parser, write_row
from fusec.gpu import device

BATCH, RUNS = 64, 7
MOST_PLANS = 16  # timed for each graph


@dataclass(frozen=True)
class Convolution:
    """A convolution of the network; `count` of them are equal."""

    inputs: int
    outputs: int
    window: int
    stride: int
    side: int
    count: int = 1

    @property
    def image(self) -> tuple[int, ...]:
        return (BATCH, self.inputs, self.side, self.side)

    @property
    def filters(self) -> tuple[int, ...]:
        return (self.outputs, self.inputs, self.window, self.window)

    @property
    def result(self) -> tuple[int, ...]:
        side = (self.side + 2 * (self.window // 2) - self.window) // self.stride + 1
        return (BATCH, self.outputs, side, side)

    def __str__(self) -> str:
        what = f"{self.inputs} to {self.outputs}, {self.window}x{self.window}"
        return f"{what}{f'/{self.stride}' if self.stride > 1 else ''} of {self.side}x{self.side}"


def convolutions() -> list[Convolution]:
    """List the convolutions of ResNet-50 that a norm follows. The stem's image is padded to four channels."""
    found = [Convolution(4, 64, 7, 2, 224)]
    channels, side = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        planes, stride = 64 << stage, 2 if stage else 1
        found += [Convolution(channels, planes, 1, 1, side), Convolution(planes, planes, 3, stride, side)]
        found += [Convolution(channels, 4 * planes, 1, stride, side)]
        side //= stride
        found += [Convolution(planes, 4 * planes, 1, 1, side)] * blocks
        found += [Convolution(4 * planes, planes, 1, 1, side), Convolution(planes, planes, 3, 1, side)] * (blocks - 1)
        channels = 4 * planes
    return [Convolution(c.inputs, c.outputs, c.window, c.stride, c.side, found.count(c)) for c in dict.fromkeys(found)]


def planned(where: Mapping[str, Any], c: Convolution, sums: bool) -> Any:
    """Make the cuDNN graph of a convolution and its list of plans.

    where: options of the graph: a handle, or the properties of a GPU that is not there.
    sums: the graph also gives the sums and the sums of squares of each channel.

    Raises RuntimeError or cudnnGraphNotSupportedError: when cuDNN refuses the graph.
    """
    import cudnn

    half, single = cudnn.data_type.HALF, cudnn.data_type.FLOAT
    g = cudnn.pygraph(io_data_type=single, intermediate_data_type=single, compute_data_type=single, **where)
    x = g.tensor(dim=list(c.image), stride=_last(c.image), data_type=half, uid=1)
    w = g.tensor(dim=list(c.filters), stride=_last(c.filters), data_type=half, uid=2)
    pads = {"pre_padding": [c.window // 2] * 2, "post_padding": [c.window // 2] * 2}
    y = g.conv_fprop(image=x, weight=w, stride=[c.stride] * 2, dilation=[1, 1], compute_data_type=single, **pads)
    y.set_uid(3).set_dim(list(c.result)).set_stride(_last(c.result)).set_data_type(half).set_output(True)
    for uid, each in enumerate(g.genstats(y, compute_data_type=single) if sums else (), 4):
        shape = (1, c.outputs, 1, 1)
        each.set_uid(uid).set_dim(list(shape)).set_stride(_last(shape)).set_data_type(single).set_output(True)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return g


def _last(shape: tuple[int, ...]) -> list[int]:
    _, channels, rows, columns = shape
    return [channels * rows * columns, 1, channels * columns, channels]


def list_plans() -> None:
    """Print how many plans each convolution has without and with sums, and their engines. Build those with sums."""
    import cudnn

    from fusec.gpu.cudnn.without_driver.deviceless import load_nvrtc
    from fusec.gpu.cudnn.without_driver.driver_stand_in import load_driver
    from fusec.targets.target import load

    load_driver()
    load_nvrtc()
    target = load("h200")
    where = {"device_property": cudnn.create_device_properties(target.properties), "sm_version": target.sm}
    for c in convolutions():
        offers: list[str] = []
        for sums in (False, True):
            try:
                g = planned(where, c, sums)
            except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
                offers.append("refused")
                continue
            count = g.get_execution_plan_count()
            engines = sorted({int(g.get_engine_and_knobs_at_index(i)[0]) for i in range(count)})
            if sums:
                for place in range(count):
                    g.build_plan_at_index(place)
            offers.append(f"{count} plans of engines {' '.join(map(str, engines))}")
        print(f"{c!s:36} alone: {offers[0]:46} with sums: {offers[1]}")


def measure(commit: str, output: Path) -> None:
    """Time the fastest plan of each convolution with a cold cache, without and with sums.

    `pass_us` is the time to read the result once, from its bytes and the GPU's bandwidth.
    """
    import cudnn
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, stream.ptr)
    time_us = cold_timer(RUNS)

    def best(c: Convolution, sums: bool) -> float | None:
        try:
            g = planned({"handle": handle}, c, sums)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
            return None
        arrays: dict[int, Any] = {3: cupy.empty(c.result, cupy.float16)}
        for uid, shape in ((1, c.image), (2, c.filters)):
            arrays[uid] = cupy.random.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16)
        arrays |= {uid: cupy.empty(c.outputs, cupy.float32) for uid in (4, 5)} if sums else {}
        pack, least = {uid: array.data.ptr for uid, array in arrays.items()}, None
        for place in range(min(g.get_execution_plan_count(), MOST_PLANS)):
            try:
                g.build_plan_at_index(place)
                room = cupy.empty(max(1, g.get_workspace_size_plan_at_index(place)), cupy.uint8)
                us = time_us(partial(g.execute_plan_at_index, pack, room.data.ptr, place, handle))
            except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
                continue  # not every plan that cuDNN lists can be built
            least = us if least is None else min(least, us)
        return least

    target, rows = device.detect(), list[dict[str, Any]]()
    assert target is not None
    with stream:
        for c in convolutions():
            found = {"convolution": str(c), "count": c.count, "alone_us": best(c, False), "with_sums_us": best(c, True)}
            size = BATCH * c.outputs * c.result[2] * c.result[3]
            rows.append({**found, "pass_us": 1e6 * 2 * size / target.memory_bandwidth})
            print(rows[-1], flush=True)
    write_row(output, gpu_and_torch(), commit, {"batch": BATCH, "convolutions": rows}, KEYS["genstats.json"])


def main() -> None:
    options = parser(__doc__, "genstats.json")
    options.add_argument("--dry", action="store_true", help="list plans only, without a GPU")
    given = options.parse_args()
    if given.dry:
        list_plans()
    else:
        measure(given.commit, given.output)


if __name__ == "__main__":
    main()
