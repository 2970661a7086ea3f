"""Rows of norms, reductions, softmax and pools: each row, channel or window holds edge values of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gpu.edges.numbers import Array, edges, name, rows
from gpu.edges.row import FLOATS, Row, added, row

from fusec.ir import DType, channels_last
from fusec.ops import (
    AllFinite,
    AvgPool,
    BatchNorm,
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    ChannelSums,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LayerNormBackward,
    LocalResponseNorm,
    MaxPool,
    MaxPoolBackward,
    MaxPoolTrain,
    Reduce,
    RmsNorm,
    Softmax,
)

F32, F16, BF16 = FLOATS
NHWC = channels_last(4)
KINDS = ("sum", "mean", "max", "min", "prod", "l1", "l2", "sum_square", "log_sum", "log_sum_exp")


def reductions() -> Iterator[Row]:
    """Reductions of each kind along the inner and the outer dim, of floats and of the largest integers."""
    for dtype in FLOATS:
        names, x = rows(dtype, 16)
        labels = np.array(names, object)
        for kind in KINDS:
            yield row(f"reduce {kind} {dtype.value}", "reduce", [x], added(Reduce(kind, (1,))), labels=labels[:, None])
            turned, op = np.ascontiguousarray(x.T), Reduce(kind, (0,), False)
            yield row(f"reduce {kind} outer {dtype.value}", "reduce", [turned], added(op), labels=labels)
    for dtype in (DType.I32, DType.I8):
        x = np.stack([np.repeat(edges(dtype), 2)[i : i + 4] for i in range(28)])
        for kind in ("sum", "max", "min", "prod", "l1", "sum_square"):
            yield row(f"reduce {kind} {dtype.value}", "reduce", [x], added(Reduce(kind, (1,))), labels=np.array(""))


def softmaxes() -> Iterator[Row]:
    for dtype in FLOATS:
        for log in (False, True):
            names, x = rows(dtype, 16)
            labels = np.array(names, object)
            word = "log " * log
            yield row(f"softmax {word}{dtype.value}", "softmax", [x], added(Softmax(-1, log)), labels=labels[:, None])
            turned = np.ascontiguousarray(x.T)
            yield row(f"softmax {word}outer {dtype.value}", "softmax", [turned], added(Softmax(0, log)), labels=labels)


def row_norms() -> Iterator[Row]:
    """Rows of edge values, and edge values as parameters."""
    for dtype in FLOATS:
        names, x = rows(dtype, 16)
        labels: Any = np.array(names, object)[:, None]
        values = edges(dtype)
        few = np.resize(np.array([0.5, -1.0], dtype.numpy), 16)
        inner: Any = np.array([name(v, dtype) for v in values], object)[None]
        for op, count in ((LayerNorm(), 2), (RmsNorm(), 1)):
            title = f"{op.name} {dtype.value}"
            yield row(title, op.name, [x, *[few] * count], added(op), labels=labels, constants=(1, 2)[:count])
            parameters = [values, values[::-1].copy()][:count]
            tame = np.tile(x[0], (8, 1))
            title = f"{op.name} parameters {dtype.value}"
            yield row(title, op.name, [tame, *parameters], added(op), labels=inner, constants=(1, 2)[:count])
        dy = np.tile(x[0], (len(names), 1))
        for op in (LayerNormBackward(), LayerNormBackward(centred=False)):
            word = "" if op.centred else " rms"
            runs = [[dy[:4], x[[0, i, 0, 0]], few] for i in range(len(names))]
            runs += [[x[[0, i, 0, 0]], dy[:4], few] for i in range(len(names))]
            title = f"layer_norm_backward{word} {dtype.value}"
            yield row(title, op.name, runs[0], added(op), more=runs[1:], labels=np.array(""))


def channel_norms() -> Iterator[Row]:
    """Channels of edge values."""
    for dtype in FLOATS:
        names, x = rows(dtype, 16)
        count = 24
        names, x = [*names, *["plain"] * (count - len(names))], np.concatenate([x, np.tile(x[:1], (count - len(x), 1))])
        image = x.reshape(1, count, 4, 4)
        labels: Any = np.array(names, object).reshape(1, count, 1, 1)
        few = np.resize(np.array([0.5, -1.0], dtype.numpy), count)
        for order in (NHWC, ()):
            known: Any = {"labels": labels, "orders": {0: order}}
            word = "" if order else " rows"
            title = f"instance_norm{word} {dtype.value}"
            yield row(title, "instance_norm", [image, few, few], added(InstanceNorm()), constants=(1, 2), **known)
            title = f"batch_norm_train{word} {dtype.value}"
            yield row(title, "batch_norm_train", [image, few, few], added(BatchNormTrain()), **known)
            yield row(
                f"channel_sums{word} {dtype.value}",
                "channel_sums",
                [image],
                added(ChannelSums()),
                labels=np.array(names, object),
                orders={0: order},
                kernel_only=True,
            )
        groups = image.reshape(count, 1, 4, 4)
        grouped = np.ascontiguousarray(np.tile(groups, (1, 4, 1, 1)))
        for op in (GroupNorm(2),):
            p = few[:4].copy()
            yield row(
                f"group_norm {dtype.value}",
                "group_norm",
                [grouped, p, p],
                added(op),
                labels=labels.reshape(count, 1, 1, 1),
                constants=(1, 2),
            )
            yield row(
                f"group_norm last {dtype.value}",
                "group_norm",
                [grouped, p, p],
                added(op),
                labels=labels.reshape(count, 1, 1, 1),
                constants=(1, 2),
                orders={0: NHWC},
            )
        yield row(f"lrn {dtype.value}", "lrn", [image], added(LocalResponseNorm(3, 0.1)), labels=labels)
        yield from _statistics(dtype, image, few, labels)


def _statistics(dtype: DType, image: Array, few: Array, labels: Any) -> Iterator[Row]:
    count = image.shape[1]
    plain = np.tile(image[:, :1], (1, count, 1, 1))
    values = np.resize(edges(dtype), count)
    named: Any = np.array([name(v, dtype) for v in values], object).reshape(1, count, 1, 1)
    size = np.abs(values)
    runs = [(0, "scale"), (1, "bias"), (2, "mean"), (3, "variance")]
    for place, word in runs:
        parameters = [few, few, few, np.abs(few)]
        parameters[place] = size if place == 3 else values
        yield row(
            f"batch_norm {word} {dtype.value}", "batch_norm", [plain, *parameters], added(BatchNorm()), labels=named
        )
    parameters = [few, few, few, np.abs(few)]
    yield row(f"batch_norm x {dtype.value}", "batch_norm", [image, *parameters], added(BatchNorm()), labels=labels)
    sums = [np.full(count, 4.0, np.float32), np.full(count, 40.0, np.float32)]
    for place, word in ((0, "sums"), (1, "squares")):
        given = [s.copy() for s in sums]
        given[place] = np.resize(edges(F32), count) if place == 0 else np.abs(np.resize(edges(F32), count))
        yield row(
            f"batch_norm_by_sums {word} {dtype.value}",
            "batch_norm_by_sums",
            [plain, few, few, *given],
            added(BatchNormBySums()),
            labels=named,
        )
    yield row(
        f"batch_norm_by_sums x {dtype.value}",
        "batch_norm_by_sums",
        [image, few, few, *sums],
        added(BatchNormBySums()),
        labels=labels,
    )
    mean, inverse = np.full(count, 0.25, dtype.numpy), np.full(count, 0.8, dtype.numpy)
    for word, dy, x in (("x", plain, image), ("dy", image, plain)):
        for relu in (False, True):
            op = BatchNormBackward(relu)
            arrays = [dy, x, few, mean, inverse, *[few] * relu]
            yield row(
                f"batch_norm_backward {word}{' relu' * relu} {dtype.value}",
                "batch_norm_backward",
                arrays,
                added(op),
                labels=labels,
                orders={0: NHWC, 1: NHWC},
            )


def pools() -> Iterator[Row]:
    """Pools over windows of edge values, with padding around them."""
    for dtype in FLOATS:
        names, x = rows(dtype, 16)
        image = np.ascontiguousarray(np.tile(x.reshape(len(names), 1, 4, 4), (1, 8, 1, 1)))
        labels: Any = np.array(names, object).reshape(-1, 1, 1, 1)
        window: Any = ((3, 3), (2, 2), (1, 1, 1, 1), (1, 1))
        for order in (NHWC, ()):
            known: Any = {"labels": labels, "orders": {0: order}}
            word = "" if order else " rows"
            yield row(f"max_pool{word} {dtype.value}", "max_pool", [image], added(MaxPool(*window)), **known)
            yield row(f"avg_pool{word} {dtype.value}", "avg_pool", [image], added(AvgPool(*window)), **known)
            yield row(
                f"max_pool_train{word} {dtype.value}", "max_pool_train", [image], added(MaxPoolTrain(*window)), **known
            )
            loss = np.resize(np.array([1.0, -2.0, 0.5, 4.0], dtype.numpy), (len(names), 8, 2, 2))
            both: Any = {"labels": labels, "orders": {0: order, 1: order}}
            yield row(
                f"max_pool_backward{word} {dtype.value}",
                "max_pool_backward",
                [loss, image],
                added(MaxPoolBackward(*window)),
                **both,
            )
        whole = AvgPool((4, 4), (4, 4), (0, 0, 0, 0), (1, 1))
        yield row(f"avg_pool whole {dtype.value}", "avg_pool", [image], added(whole), labels=labels, orders={0: NHWC})
    x = np.resize(edges(DType.I8), (1, 8, 4, 4))
    yield row("max_pool i8", "max_pool", [x], added(MaxPool((2, 2), (1, 1), (1, 1, 1, 1), (1, 1))), labels=np.array(""))


def all_finite() -> Iterator[Row]:
    for dtype in FLOATS:
        plain = np.ones((3, 37), dtype.numpy)
        runs: list[list[Array]] = []
        for value in edges(dtype):
            x = plain.copy()
            x[1, 5] = value
            runs.append([x, plain])
        yield row(
            f"all_finite {dtype.value}", "all_finite", runs[0], added(AllFinite()), more=runs[1:], labels=np.array("")
        )
