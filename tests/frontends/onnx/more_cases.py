"""Cases of the ops that index, sample, unroll and quantise; test_ops.py runs them with those of cases.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from frontends.onnx.cases import Case, Maker, bools, f16, f32, fixed, floats, i64, integers, odd_floats, unit

U8 = np.uint8


def distinct(*shape: int) -> Maker:
    """All different, so that orders and places are unique."""
    return lambda rng: rng.permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)


def _integers_with_bits() -> list[Case]:
    return [
        *(Case(op, 18, [integers(3, 4), integers(4)]) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
        Case("BitwiseNot", 18, [integers(3, 4, dtype=np.int32)]),
        *(
            Case("BitShift", 11, [integers(5, low=0, high=200, dtype=t), integers(5, low=0, high=8, dtype=t)],
                 {"direction": way})
            for t in (np.uint8, np.uint32) for way in ("LEFT", "RIGHT")
        ),
        Case("Cast", 6, [f32(3, 5)], {"to": 10}, oldest=19),
        Case("Shrink", 9, [f32(3, 5)], {"bias": 0.2, "lambd": 0.7}),
    ]  # fmt: skip


def _extremes() -> list[Case]:
    return [
        *(
            Case(op, 1, [x], a, oldest=since)
            for op in ("ArgMax", "ArgMin") for since in (1, 12)
            for x, a in ((f32(3, 4, 2), {"axis": 1}), (f32(3, 4), {"axis": 0, "keepdims": 0}),
                         (integers(5, 9, low=0, high=3, dtype=np.int32), {"axis": 1}))
        ),
        Case("ArgMax", 1, [integers(5, 9, low=0, high=3)], {"axis": -1, "select_last_index": 1}, oldest=12),
        Case("Hardmax", 1, [f32(3, 4, 2)]),
        Case("Hardmax", 1, [f32(3, 4, 2)], {"axis": 2}),
        Case("Hardmax", 13, [f32(3, 4, 2)]),
        Case("TopK", 1, [distinct(3, 7)], {"k": 4}, outputs=2),
        Case("TopK", 10, [distinct(3, 7), i64(3)], {"axis": 0}, outputs=2),
        Case("TopK", 10, [distinct(3, 7), i64(3)], outputs=2, oldest=11),
        Case("TopK", 10, [integers(4, 9, low=0, high=4), i64(5)], {"largest": 0}, outputs=2, oldest=11),
    ]  # fmt: skip


def _picking() -> list[Case]:
    return [
        Case("GatherElements", 11, [f32(3, 4), integers(2, 4, low=-3, high=3)]),
        Case("GatherElements", 11, [f32(3, 4, 2), integers(3, 5, 1, low=-4, high=4)], {"axis": 1}),
        Case("GatherND", 11, [f32(3, 4, 2), integers(5, 2, low=-3, high=3)]),
        Case("GatherND", 11, [f32(2, 3, 4, 2), integers(2, 5, 2, low=-3, high=3)], {"batch_dims": 1}, oldest=12),
        Case("GatherND", 11, [f32(3, 4), integers(5, 2, 1, low=-3, high=3)]),
        Case("GatherElements", 11, [f32(3, 1), integers(2, 1, low=-3, high=3)]),
        Case("ScatterElements", 11, [f32(5), np.array([1, -1]), f32(2)]),
        Case("Scatter", 9, [f32(3, 3), np.array([[1, 0, 2], [0, 2, 1]]), f32(2, 3)]),
        Case("ScatterElements", 11, [f32(3, 4), np.array([[1, -1], [0, 2]]), f32(2, 2)], {"axis": 1}),
        *(
            Case("ScatterElements", 11, [f32(3, 4), integers(2, 3, low=-3, high=3), f32(2, 3)], {"reduction": r},
                 oldest=18)
            for r in ("add", "mul", "max", "min")
        ),
        Case("ScatterND", 11, [f32(4, 3), np.array([[3], [-4]]), f32(2, 3)]),
        Case("ScatterND", 11, [f32(4, 3, 2), np.array([[3, 1], [0, 2]]), f32(2, 2)]),
        *(
            Case("ScatterND", 11, [f32(4, 3), integers(6, 1, low=0, high=4), f32(6, 3)], {"reduction": r}, oldest=18)
            for r in ("add", "mul", "max", "min")
        ),
        Case("ReverseSequence", 10, [f32(5, 3, 2), i64(5, 1, 3)]),
        Case("ReverseSequence", 10, [f32(3, 5), fixed(2, 5, 3, dtype=np.int64)], {"time_axis": 1, "batch_axis": 0}),
        Case("OneHot", 9, [integers(2, 3, low=-4, high=7), np.array(4), floats(0.5, 2.0)], {"axis": 1}),
        Case("OneHot", 9, [integers(3, low=0, high=5), np.array(4), fixed(0, 1, dtype=np.int64)]),
        Case("Compress", 9, [f32(3, 4), np.array([True, False, True])], {"axis": 0}),
        Case("Compress", 9, [f32(3, 4), np.array([False, True, True, False, True])]),
        Case("NonZero", 9, [np.array([[1.0, 0.0], [2.0, 3.0]], np.float32)]),
        Case("Unique", 11, [floats(2, 1, 1, 3, 4, 3)], outputs=4),
        Case("Unique", 11, [floats(2, 1, 1, 3, 4, 3)], {"sorted": 0}, outputs=4),
        Case("Unique", 11, [np.array([[1, 0, 0], [1, 0, 0], [2, 3, 4]], np.float32)], {"axis": 0}, outputs=4),
        *(_suppression(center) for center in (0, 1)),
        *(
            Case("Trilu", 14, [f32(2, 4, 5), *k], {"upper": upper})
            for upper in (0, 1) for k in ([], [np.array(1)], [np.array(-2)])
        ),
        Case("EyeLike", 9, [f32(3, 4)], {"k": 1}),
        Case("EyeLike", 9, [f32(3, 4)], {"dtype": 7, "k": -1}),
        *(
            Case("CumSum", 11, [x, np.array(axis)], {"exclusive": e, "reverse": r})
            for x, axis in ((f32(3, 4, 2), 1), (integers(3, 4), -1)) for e in (0, 1) for r in (0, 1)
        ),
        Case("CumProd", 26, [unit(3, 4), np.array(1)], {"exclusive": 1, "reverse": 1}),
    ]  # fmt: skip


def _suppression(center: int) -> Case:
    rng = np.random.default_rng(center)
    boxes = rng.random((2, 9, 4)).astype(np.float32)
    scores = rng.random((2, 3, 9)).astype(np.float32)
    limits = [i64(4), floats(0.3), floats(0.2)]
    return Case("NonMaxSuppression", 10, [boxes, scores, *limits], {"center_point_box": center}, oldest=11)


def _products() -> list[Case]:
    shapes = {
        "ij,jk->ik": ((3, 4), (4, 5)),
        "bij,bjk": ((2, 3, 4), (2, 4, 5)),
        "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
        "...ij,...jk->...ik": ((2, 3, 4), (4, 5)),
        "ii->i": ((4, 4),),
        "ii": ((4, 4),),
        "ij->ji": ((3, 4),),
        "i,j": ((3,), (4,)),
        "bij,bkl,bm->kjm": ((2, 3, 4), (2, 5, 2), (2, 3)),
        "ijj,jk->ki": ((3, 4, 4), (4, 2)),
    }
    # signed weights of 7 bits, because onnxruntime saturates sums of two products on CPUs without VNNI
    u8, i8 = integers(3, 4, low=0, high=256, dtype=U8), integers(4, 5, low=-64, high=64, dtype=np.int8)
    image = integers(1, 2, 5, 5, low=0, high=256, dtype=U8)
    filters = integers(3, 2, 3, 3, low=0, high=256, dtype=U8)
    signed = integers(3, 2, 3, 3, low=-64, high=64, dtype=np.int8)
    zero = np.array(120, U8)
    return [
        *(Case("Einsum", 12, [f32(*s) for s in dims], {"equation": e}) for e, dims in shapes.items()),
        Case("Einsum", 12, [integers(3, 4), integers(4, 5)], {"equation": "ij,jk->ki"}),
        Case("MatMulInteger", 10, [u8, i8, np.array(7, U8), np.array(3, np.int8)]),
        Case("MatMulInteger", 10, [u8, i8]),
        Case("MatMulInteger", 10, [integers(3, 4, low=-128, high=128, dtype=np.int8), i8]),
        Case("MatMulInteger", 10, [integers(2, 3, 4, low=0, high=256, dtype=U8), i8, np.array(250, U8)]),
        Case("ConvInteger", 10, [image, filters, zero], {"pads": [1, 1, 1, 1]}),
        Case("ConvInteger", 10, [image, signed, zero], {"pads": [1, 1, 0, 1], "strides": [2, 1]}),
        Case("ConvInteger", 10, [image, signed]),
        Case("QLinearMatMul", 10, [u8, floats(0.02).reshape(()), zero, i8, floats(0.03).reshape(()),
                                   np.array(2, np.int8), floats(1.1).reshape(()), np.array(99, U8)]),
        Case("QLinearConv", 10, [image, floats(0.02).reshape(()), zero, filters, floats(0.03).reshape(()), zero,
                                 floats(1.7).reshape(()), np.array(99, U8), np.array([5, -700, 9], np.int32)]),
        *(Case("QuantizeLinear", 10, [f32(3, 4), floats(0.02).reshape(()), zero], oldest=o) for o in (10, 13, 19)),
        Case("QuantizeLinear", 10, [f32(3, 4), floats(0.02, 0.5, 0.1, 1.0), np.array([0, 1, -2, 3], np.int8)],
             oldest=13),
        *(Case("DequantizeLinear", 10, [u8, floats(0.02).reshape(()), zero], oldest=o) for o in (10, 13, 21)),
        Case("DequantizeLinear", 10, [u8, floats(0.02, 0.5, 1.5), np.array([0, 1, 2], U8)], {"axis": 0}, oldest=13),
        Case("DequantizeLinear", 10, [u8, np.full((3, 2), 0.5, np.float32), np.full((3, 2), 9, U8)],
             {"axis": 1, "block_size": 2}, oldest=21),
        Case("QuantizeLinear", 10, [f32(4, 3), np.full((2, 3), 0.03, np.float32), np.full((2, 3), 9, U8)],
             {"axis": 0, "block_size": 2}, oldest=21),
    ]  # fmt: skip


def _recurrent() -> list[Case]:
    cases: list[Case] = []
    for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        states = 2 if op == "LSTM" else 1
        for direction in ("forward", "reverse", "bidirectional"):
            n = 2 if direction == "bidirectional" else 1
            weights: list[Any] = [f32(n, gates * 3, 4), f32(n, gates * 3, 3), f32(n, 2 * gates * 3)]
            start = [f32(n, 2, 3) for _ in range(states)]
            own = {"direction": direction, "hidden_size": 3}
            lengths = np.array([5, 3], np.int32)
            cases += [
                Case(op, 7, [f32(5, 2, 4), *weights[:2]], own, outputs=1 + states),
                Case(op, 7, [f32(5, 2, 4), *weights, lengths, *start], own, outputs=1 + states),
                Case(op, 7, [f32(5, 2, 4), *weights, None, *start], {**own, "clip": 0.5}, outputs=1 + states),
            ]
    gru = [f32(5, 2, 4), f32(1, 9, 4), f32(1, 9, 3), f32(1, 18)]
    lstm = [f32(5, 2, 4), f32(1, 12, 4), f32(1, 12, 3), f32(1, 24), None, None, None, f32(1, 9)]
    return [
        *cases,
        Case("GRU", 7, gru, {"hidden_size": 3, "linear_before_reset": 1}, outputs=2),
        Case("GRU", 7, gru, {"hidden_size": 3, "activations": ["HardSigmoid", "LeakyRelu"],
                             "activation_alpha": [0.3, 0.2], "activation_beta": [0.4]}, outputs=2),
        Case("LSTM", 7, lstm, {"hidden_size": 3}, outputs=3),
        Case("LSTM", 7, lstm, {"hidden_size": 3, "input_forget": 1}, outputs=3),
    ]  # fmt: skip


def _sampling() -> list[Case]:
    grid = lambda rng: rng.uniform(-1.4, 1.4, (2, 4, 5, 2)).astype(np.float32)  # noqa: E731
    rois = np.array([[0, 0, 9, 9], [2, 1, 6, 11], [4, 3, 5, 4]], np.float32)
    image = [f32(2, 3, 6, 7), grid]
    align = {"output_height": 3, "output_width": 2, "sampling_ratio": 2, "spatial_scale": 0.5}
    return [
        *(
            Case("GridSample", 16, image, {"mode": m, "padding_mode": p, "align_corners": a}, rtol=1e-4)
            for m in ("bilinear", "bicubic", "nearest") for p in ("zeros", "border", "reflection") for a in (0, 1)
        ),
        Case("GridSample", 20, [f32(1, 2, 4, 5, 3), lambda rng: rng.uniform(-1.2, 1.2, (1, 3, 2, 4, 3)).astype("f4")],
             {"mode": "linear"}, rtol=1e-4),
        *(
            Case("AffineGrid", 20, [f32(n, len(d), len(d) + 1), i64(n, 3, *d)], {"align_corners": a}, rtol=1e-4)
            for n, d in ((1, (4, 5)), (3, (4, 5)), (1, (3, 4, 5)), (2, (3, 4, 5))) for a in (0, 1)
        ),
        Case("RoiAlign", 10, [f32(2, 3, 6, 6), rois, i64(0, 1, 1)], align, rtol=1e-4),
        Case("RoiAlign", 16, [f32(2, 3, 6, 6), rois, i64(0, 1, 1)], align, rtol=1e-4),
        Case("RoiAlign", 16, [f32(2, 3, 6, 6), rois, i64(0, 1, 1)], {**align, "mode": "max"}, rtol=1e-4),
        Case("RoiAlign", 16, [f32(2, 3, 6, 6), rois, i64(0, 1, 1)], {**align, "sampling_ratio": 0}, rtol=1e-4),
        Case("RoiAlign", 16, [f32(2, 3, 6, 6), rois, i64(0, 1, 1)],
             {**align, "coordinate_transformation_mode": "output_half_pixel"}, rtol=1e-4),
        Case("MaxRoiPool", 1, [f32(2, 3, 6, 6), np.concatenate([np.array([[0], [1], [1]], np.float32), rois], 1)],
             {"pooled_shape": [3, 2], "spatial_scale": 0.5}),
        Case("DeformConv", 19, [f32(1, 4, 6, 6), f32(2, 2, 3, 3), f32(1, 36, 6, 6), f32(2), f32(1, 18, 6, 6)],
             {"pads": [1, 1, 1, 1], "group": 2, "offset_group": 2}, rtol=1e-4),
        Case("Col2Im", 18, [f32(2, 8, 20), i64(6, 5), i64(2, 2)]),
        Case("Col2Im", 18, [f32(1, 12, 9), i64(5, 7), i64(3, 2)], {"strides": [2, 3], "pads": [1, 1, 2, 2]}),
        Case("LpPool", 2, [f32(1, 2, 6, 5)], {"kernel_shape": [3, 2], "p": 3, "pads": [1, 0, 0, 1]}, rtol=1e-4),
        Case("MaxUnpool", 9, [f32(1, 1, 2, 2), np.array([5, 7, 13, 15]).reshape(1, 1, 2, 2)],
             {"kernel_shape": [2, 2], "strides": [2, 2]}),
        *(
            Case("MaxPool", 1, [distinct(2, 3, 6, 5)], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], **more},
                 outputs=2, oldest=8)
            for more in ({}, {"strides": [2, 1]}, {"storage_order": 1})
        ),
        *(
            Case("Resize", 11, [f32(1, 2, 5, 6), floats(), floats(1, 1, *s)], {"mode": "cubic", **more}, oldest=13)
            for s in ((2, 1.5), (0.6, 0.5))
            for more in ({}, {"cubic_coeff_a": -0.5, "exclude_outside": 1},
                         {"coordinate_transformation_mode": "asymmetric"})
        ),
        *(
            Case("Resize", 11, [f32(1, 2, 8, 9), None, None, i64(1, 2, 3, 5)], {"mode": m, "antialias": 1}, rtol=1e-4,
                 oldest=18)
            for m in ("linear", "cubic")
        ),
        Case("Resize", 11, [f32(1, 2, 5, 6), floats(0, 0, 0.2, -0.3, 1, 1, 0.9, 1.2), None, i64(1, 2, 4, 7)],
             {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 3.0},
             oldest=13),
    ]  # fmt: skip


def _spectra() -> list[Case]:
    return [
        *(
            Case("DFT", 17, [f32(2, 10, parts)], {"axis": 1, "inverse": i, "onesided": o}, rtol=1e-5)
            for parts, i, o in ((1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0))
        ),
        Case("DFT", 17, [f32(2, 10, 3, 2), np.array(8)], {"axis": 1}),
        Case("DFT", 20, [f32(2, 10, 1), None, np.array(1)]),
        Case("STFT", 17, [f32(2, 32), np.array(8), floats(*np.hanning(16))], {"onesided": 1}),
        Case("STFT", 17, [f32(1, 32, 1), np.array(4), None, np.array(8)], {"onesided": 0}),
        Case("MelWeightMatrix", 17, [np.array(8), np.array(16), np.array(8192), floats(0.0).reshape(()),
                                     floats(4096.0).reshape(())]),
        *(
            Case("TfIdfVectorizer", 9, [integers(2, 12, low=0, high=4)],
                 {"mode": mode, "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 2, "ngram_counts": [0, 2],
                  "ngram_indexes": [3, 0, 1, 2], "pool_int64s": [2, 3, 1, 2, 3, 3], "weights": [0.5, 2.0, 3.0, 0.1]})
            for mode in ("TF", "IDF", "TFIDF")
        ),
        Case("Det", 11, [f32(3, 3)]),
        Case("Det", 11, [f32(2, 4, 4)]),
    ]  # fmt: skip


def _others() -> list[Case]:
    return [
        Case("ReduceMin", 18, [np.zeros((2, 0, 3), np.int32), i64(1)], oldest=20),
        Case("LayerNormalization", 17, [f32(2, 3, 4), f32(4), f32(4)], outputs=3),
        Case("LayerNormalization", 17, [f16(2, 3, 4), f16(4), f16(4)], rtol=1e-3),
        Case("BatchNormalization", 7, [f32(2, 3, 4), f32(3), f32(3), f32(3), unit(3)], {"training_mode": 1}, outputs=3,
             oldest=14),
        Case("Dropout", 12, [f32(3, 4)], outputs=2),
        Case("IsInf", 10, [odd_floats(9)]),
        Case("Not", 1, [bools(3)]),
    ]  # fmt: skip


MORE: list[Case] = [
    *_integers_with_bits(),
    *_extremes(),
    *_picking(),
    *_products(),
    *_recurrent(),
    *_sampling(),
    *_spectra(),
    *_others(),
]
