"""Time a RetinaNet in fp16 from images to the boxes that non-maximum suppression keeps, with fusec and with torch.

Usage, with a GPU, torch and torchvision: python -m benchmarks.models.detectors [MODEL:BATCH ...]
    [--peers eager,compile] [--products ATEN,TRITON] [--peer-seconds 100] [--tune quick] [--budget SECONDS]
The weights are drawn. Each image gives its best CANDIDATES boxes, which are decoded in fp32. fusec runs the exported
model with NonMaxSuppression as one program, and crops its results to the number of boxes that stay. The peers are torch
eager with cudnn.benchmark and torch.compile with max-autotune and freezing: a CUDA graph up to the candidates, then one
torchvision.ops.nms for all images. All take channels-last images on the GPU, and are timed by the host's clock until
their results are on the GPU. Writes benchmarks/results/detectors.json. With --simulate, small images run without a GPU,
and nothing is timed or written.
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import onnx
import torch
import torchvision
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import nn
from torchvision.models.detection import retinanet_resnet50_fpn

import fusec
from benchmarks.common.attempt import Attempt, TooLongError, within
from benchmarks.common.result_files import parser
from benchmarks.common.torch_timing import (
    PRODUCTS,
    Autotune,
    autotuned,
    best_peer_over_fusec,
    captured,
    free_memory,
    host_ms,
    limits_and_steps,
    relative_l2,
    start_workers,
    timed,
)
from fusec.diagnostics.step_times import measure
from fusec.segments.executable import SegmentedExecutable

NAME = "detectors.json"
CASES = ("retinanet:1", "retinanet:8")
PEERS = ("eager", "compile")
SIDE, SMALL = 640, 64  # of an image, and of one in simulation
CANDIDATES, IOU = 1000, 0.5
ROUNDS, ROUND_S = 15, 0.05
NEW_IMAGES = 12
TOLERANCE = 2e-2  # relative L2 of the candidates' scores
Candidates = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """Options that all cases share.

    tune, budget_s: as `fusec.compile` takes them.
    peer_s: seconds after which a peer that is not ready is left out; 0 is no limit.
    products: libraries whose matrix products torch.compile times; those of 1x1 convolutions are among them.
    """

    peers: tuple[str, ...]
    tune: str
    budget_s: float
    peer_s: float
    products: str
    simulate: bool


class Detector(nn.Module):
    """RetinaNet (T.-Y. Lin et al., 2017) up to its candidates: torchvision's backbone and head, one label for a box."""

    def __init__(self, side: int):
        super().__init__()
        model = retinanet_resnet50_fpn(weights=None, weights_backbone=None)
        self.backbone, self.head, self.side = model.backbone, model.head, side
        self.candidates = CANDIDATES if side == SIDE else 50
        with torch.no_grad():
            features = list(self.backbone.eval()(torch.zeros(1, 3, side, side)).values())
            images = torchvision.models.detection.image_list.ImageList(torch.zeros(1, 3, side, side), [(side, side)])
            (anchors,) = model.anchor_generator(images, features)
        corner, opposite = anchors[:, :2], anchors[:, 2:]
        self.register_buffer("sizes", opposite - corner)
        self.register_buffer("centres", (corner + opposite) / 2)

    def forward(self, images: torch.Tensor) -> Candidates:
        """Return boxes f32[B, K, 4], the boxes apart by label, scores f32[B, K], and labels i64[B, K]."""
        found = self.head(list(self.backbone(images).values()))
        scores, labels = found["cls_logits"].max(-1)
        scores, best = scores.float().topk(self.candidates)
        moved = found["bbox_regression"].gather(1, best[..., None].expand(-1, -1, 4)).float()
        sizes, centres = (x[best] for x in (self.sizes, self.centres))
        centres = centres + moved[..., :2] * sizes
        half = moved[..., 2:].clamp(max=4.0).exp() * sizes / 2
        boxes = torch.cat([centres - half, centres + half], -1).clamp(0.0, float(self.side))
        labels = labels.gather(1, best)
        apart = boxes + labels[..., None].float() * (self.side + 1)
        return boxes, apart, scores.sigmoid(), labels


def detector(side: int, simulate: bool) -> Detector:
    """Make the detector in fp16, with its anchors in fp32, and with scores and boxes that differ."""
    torch.manual_seed(0)
    model = Detector(side).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.running_mean, std=0.1)
    for conv in model.head.modules():
        if isinstance(conv, nn.Conv2d):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.normal_(conv.bias, std=0.1)
    with torch.no_grad():
        cast("Any", model.head).regression_head.bbox_reg.weight.mul_(0.1)
    model = model if simulate else model.cuda()
    model.backbone.half()
    model.head.half()
    return model


def exported(model: nn.Module, images: torch.Tensor) -> bytes:
    """Export the detector, and add NonMaxSuppression and the choice of what it keeps."""
    file, names = io.BytesIO(), ["boxes", "apart", "scores", "labels"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (images,), file, input_names=["x"], output_names=names, dynamo=False, opset_version=17)
    return with_suppression(onnx.load_from_string(file.getvalue())).SerializeToString()


def with_suppression(model: ModelProto) -> ModelProto:
    """Add what a detector ends with: rows i64[M, 2] (image and candidate), and their boxes, scores and labels."""
    graph = model.graph
    count = graph.output[0].type.tensor_type.shape.dim[1].dim_value
    held = {"one": [1], "most": [count], "columns": [0, 2]}
    graph.initializer.extend(numpy_helper.from_array(np.array(x, np.int64), f"nms_{name}") for name, x in held.items())
    graph.initializer.append(numpy_helper.from_array(np.array([IOU], np.float32), "nms_iou"))
    found = ["chosen_boxes", "chosen_scores", "chosen_labels"]
    graph.node.extend(
        [
            helper.make_node("Unsqueeze", ["scores", "nms_one"], ["nms_scores"]),
            helper.make_node("NonMaxSuppression", ["apart", "nms_scores", "nms_most", "nms_iou"], ["nms_rows"]),
            helper.make_node("Gather", ["nms_rows", "nms_columns"], ["rows"], axis=1),
            *(helper.make_node("GatherND", [name[7:], "rows"], [name]) for name in found),
        ]
    )
    del graph.output[:]
    for name in ("rows", *found):
        kind = TensorProto.INT64 if name in ("rows", "chosen_labels") else TensorProto.FLOAT
        dims = ["count", *({"rows": [2], "chosen_boxes": [4]}.get(name, []))]
        graph.output.append(helper.make_tensor_value_info(name, kind, dims))
    return model


def suppressed(candidates: Candidates) -> tuple[torch.Tensor, ...]:
    """Return image, boxes, scores and labels of the candidates that torchvision's NMS keeps of all images."""
    boxes, apart, scores, labels = candidates
    images = torch.arange(len(boxes), device=boxes.device)[:, None].expand(-1, boxes.shape[1])
    far = (apart + images[..., None] * (apart.max() + 1)).flatten(0, 1)
    keep = torchvision.ops.nms(far, scores.flatten(), IOU)
    return tuple(x.flatten(0, 1)[keep] for x in (images, boxes, scores, labels))


def replayed(replay: Callable[[], None], candidates: Candidates) -> tuple[torch.Tensor, ...]:
    """Compute the candidates again, and return those that are not suppressed."""
    replay()
    return suppressed(candidates)


def matched(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Return the share of detections that have one of the same image and label with an IoU above 0.9.

    got, want: image, boxes, scores and labels.
    """
    iou = torchvision.ops.box_iou(got[1], want[1])
    same = (got[0][:, None] == want[0]) & (got[3][:, None] == want[3]) & (iou > 0.9)
    return float(same.any(1).double().mean())


def called(contenders: Mapping[str, Callable[[], object]], rounds: int, round_s: float) -> dict[str, dict[str, float]]:
    """Return medians and deciles of the time of a call in ms, by the host's clock; contenders take turns."""
    return timed({}, rounds, round_s, {name: partial(host_ms, run) for name, run in contenders.items()})


def on_new_images(contenders: Mapping[str, Callable[[], object]], images: torch.Tensor) -> dict[str, float]:
    """Return medians of the ms of a first call with other images, which have another number of detections.

    images: the memory that all contenders read.
    """
    times: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(NEW_IMAGES):
        for who, run in contenders.items():
            images.copy_(torch.randn_like(images))
            torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times[who].append(1000 * (time.perf_counter() - started))
    return {who: statistics.median(series) for who, series in times.items()}


def peer(name: str, model: nn.Module, images: torch.Tensor, products: str) -> tuple[Callable[[], None], Candidates]:
    """Capture a peer up to the candidates; return its replay and the candidates."""
    fast = autotuned(model, Autotune(products=products, freezing=True)) if name == "compile" else model
    return captured(lambda: fast(images))


def case(name: str, settings: Settings, attempt: Attempt) -> dict[str, Any]:
    """Measure a detector."""
    kind, batch = name.split(":")
    if kind != "retinanet":
        raise SystemExit(f"there is no detector {kind!r}: {', '.join(CASES)}")
    model = detector(SMALL if settings.simulate else SIDE, settings.simulate)
    images = torch.randn(int(batch), 3, model.side, model.side).half()
    images = (images if settings.simulate else images.cuda()).to(memory_format=torch.channels_last)
    started = time.perf_counter()
    data = exported(model, images)
    row: dict[str, Any] = {"model": kind, "batch": int(batch), "exported_s": round(time.perf_counter() - started, 2)}
    with torch.inference_mode():
        wide = detector(model.side, settings.simulate).float()
        want = tuple(x.clone() for x in wide(images.float()))
        del wide
    row["candidates"] = want[0].shape[1]
    attempt.say(f"{name}: exported")
    executable, feeds = compiled(data, images, settings, row)
    attempt.say(f"{name}: compiled, {row['launches']} launches in {row['segments']} segments")
    assert isinstance(executable, SegmentedExecutable)
    results = dict(zip([s.name for s in executable.outputs], executable.run(None, feeds), strict=True))
    torch.cuda.synchronize() if not settings.simulate else None
    rows, *rest = (torch.as_tensor(results[n]) for n in ("rows", "chosen_boxes", "chosen_scores", "chosen_labels"))
    detections = {"fusec": (rows[:, 0].clone(), *(x.clone() for x in rest))}
    contenders: dict[str, Callable[[], object]] = {"fusec": partial(executable.run, None, feeds)}
    device_only: dict[str, Callable[[], None]] = {}
    with torch.inference_mode():
        final = suppressed(cast("Candidates", want))
        model = model.to(memory_format=torch.channels_last)
        for one in () if settings.simulate else settings.peers:
            started = time.perf_counter()
            try:
                with within(settings.peer_s):
                    replay, candidates = peer(one, model, images, settings.products)
            except TooLongError as reason:
                row.setdefault("missing", {})[one] = str(reason)
                attempt.say(f"{one}: {reason}")
                continue
            row[f"{one}_compile_s"] = round(time.perf_counter() - started, 2)
            if one == "compile":
                row["products"] = settings.products
            attempt.say(f"{name}: {one} captured")
            replay()
            row.setdefault("errors", {})[one] = relative_l2(candidates[2], want[2])
            detections[one] = suppressed(candidates)
            device_only[one] = replay
            contenders[one] = partial(replayed, replay, candidates)
        row["detections"] = {"torch in fp32": len(final[0])} | {who: len(found[0]) for who, found in detections.items()}
        row["matched"] = {who: matched(found, final) for who, found in detections.items()}
        # the best scores are never suppressed, and their order does not depend on rounding
        top = sorted_scores(final)[: len(final[0]) // 2]
        row.setdefault("errors", {})["fusec"] = relative_l2(sorted_scores(detections["fusec"])[: len(top)], top)
        row["ok"] = all(error <= TOLERANCE for error in row["errors"].values())
        if not settings.simulate:
            row["times"] = called(contenders, ROUNDS, ROUND_S)
            attempt.say(f"{name}: ms of a call: { ({who: t['median_ms'] for who, t in row['times'].items()}) }")
            attempt.keep(row)
            row["best_peer_over_fusec"] = best_peer_over_fusec(row["times"], settings.peers)
            row["new_image_ms"] = on_new_images(contenders, images)
            attempt.say(f"{name}: ms of a call with images that were not seen: {row['new_image_ms']}")
            times_on_device(row, executable, feeds, device_only)
    return row


def sorted_scores(detections: Sequence[torch.Tensor]) -> torch.Tensor:
    return detections[2].sort(descending=True).values


def compiled(
    data: bytes, images: torch.Tensor, settings: Settings, row: dict[str, Any]
) -> tuple[SegmentedExecutable, dict[str, Any]]:
    """Compile the detector and call it twice. Record the seconds; return it with its inputs."""
    options: dict[str, Any] = {"target": "h200", "simulate": True}
    feeds: dict[str, Any] = {"x": images.numpy() if settings.simulate else images}
    if not settings.simulate:
        options = {"tune": settings.tune, "budget": settings.budget_s}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSEC_CACHE"] = folder  # an empty cache
        started = time.perf_counter()
        executable = fusec.compile(data, channels_last=["x"], **options)
        for _ in range(2):
            executable.run(None, feeds)
        row["compile_s"] = round(time.perf_counter() - started, 2)  # and two calls
    if executable.spent is not None:
        row["compile_parts_s"] = {what: round(spent.seconds, 2) for what, spent in executable.spent.stages.items()}
    found = executable.explain()
    row["launches"], row["segments"] = found.totals["launches"], found.totals["segments"]
    return cast("SegmentedExecutable", executable), feeds


def times_on_device(
    row: dict[str, Any],
    executable: SegmentedExecutable,
    feeds: Mapping[str, Any],
    peers: Mapping[str, Callable[[], None]],
) -> None:
    """Record the time on the device, fusec's steps there, and its host steps.

    fusec's program includes NonMaxSuppression and what follows it; those of the peers end at the candidates.
    """
    first = executable.programs[0]
    steps = limits_and_steps(measure(first, feeds, 10))
    row["on_device"] = timed({"fusec": first.replay, **peers})
    row |= steps
    executable.run(None, feeds)
    row["segment_seconds"] = [
        {"runs_as": one.runs_as, "s": one.seconds, "host_steps": {step.op: step.seconds for step in one.steps}}
        for _, one in executable.last_segments()
    ]


def show(row: dict[str, Any], worst: int) -> None:
    """Print a row, and its `worst` slowest steps."""
    for name, value in row.items():
        if name != "steps":
            print(f"  {name}: {value}", flush=True)
    for step in sorted(row.get("steps", ()), key=lambda s: -s["us"])[:worst]:
        print(f"      {step['us']:8.1f} {step['limit_us']:7.1f} {step['kind']:7} {step['step'][:100]}")


def main() -> int:
    options = parser(__doc__, NAME, budget=True)
    options.add_argument("cases", nargs="*", default=list(CASES), help="MODEL:BATCH")
    options.add_argument("--peers", default=",".join(PEERS), help="the peers to measure, separated by commas")
    options.add_argument("--peer-seconds", type=float, default=100.0, help="leave out a slower peer; 0: no limit")
    options.add_argument("--products", default=PRODUCTS, help="libraries whose products torch.compile times")
    options.add_argument("--tune", default="quick")
    options.add_argument("--simulate", action="store_true", help="run small images without a GPU, and time nothing")
    options.add_argument("--worst", type=int, default=12, help="number of the slowest steps to print")
    given = options.parse_args()
    peers = tuple(p for p in given.peers.split(",") if p)
    if unknown := set(peers) - set(PEERS):
        options.error(f"--peers takes {', '.join(PEERS)}, not {', '.join(sorted(unknown))}")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.backends.cudnn.benchmark = True
    settings = Settings(peers, given.tune, given.budget, given.peer_seconds, given.products, given.simulate)
    if "compile" in peers and not given.simulate:
        start_workers()  # while the model is exported
    attempt, good = Attempt(given.output, given.commit), True
    for name in given.cases:
        row = case(name, settings, attempt)
        good = good and row["ok"]
        show(row, given.worst)
        if not given.simulate:
            attempt.keep(row)
            free_memory()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
