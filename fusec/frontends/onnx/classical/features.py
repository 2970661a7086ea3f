"""Import the ops that prepare features: scale, normalise, replace, select and join columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.ops.strings import codes
from fusec.ir import DType, Value
from fusec.ops import Cast, Concat, Gather, Reduce, pw
from fusec.ops.spec import require

SHOWN = 8  # labels in a message


def floats(g: Emitter, numbers: Sequence[float]) -> Value:
    return g.constant(np.array(numbers, np.float32))


def scaler(g: Emitter, x: Value, /, *, offset: tuple[float, ...] = (), scale: tuple[float, ...] = ()) -> Value:
    y = g.cast(x, DType.F32)
    y = g(pw("sub"), y, floats(g, offset)) if offset else y
    return g(pw("mul"), y, floats(g, scale)) if scale else y


def normalizer(g: Emitter, x: Value, /, *, norm: str = "MAX") -> Value:
    """Import Normalizer, which divides rows by their norm. Rows whose norm is 0 stay."""
    require(norm in ("MAX", "L1", "L2"), f"norm {norm!r} is not known")
    kind = {"MAX": "max", "L1": "l1", "L2": "l2"}[norm]
    y = g.cast(x, DType.F32)
    size = g(Reduce(kind, (y.type.rank - 1,)), y)
    one = g.scalar(1.0, y)
    return g(pw("div"), y, g(pw("where"), g(pw("cmp_eq"), size, g.scalar(0.0, y)), one, size))


def binarizer(g: Emitter, x: Value, /, *, threshold: float = 0.0) -> Value:
    return g.cast(g(pw("cmp_gt"), x, g.scalar(threshold, x)), x.type.dtype)


def imputer(
    g: Emitter,
    x: Value,
    /,
    *,
    imputed_value_floats: tuple[float, ...] = (),
    imputed_value_int64s: tuple[int, ...] = (),
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Value:
    values = imputed_value_floats if x.type.dtype.is_float else imputed_value_int64s
    require(bool(values), f"has no values for {x.type.dtype.value}")
    replaced = replaced_value_float if x.type.dtype.is_float else replaced_value_int64
    missing = g(pw("is_nan"), x) if math.isnan(replaced) else g(pw("cmp_eq"), x, g.scalar(replaced, x))
    return g(pw("where"), missing, g.constant(np.array(values, x.type.dtype.numpy)), x)


def feature_vectorizer(g: Emitter, /, *inputs: Value, inputdimensions: tuple[int, ...] = ()) -> Value:
    rows = [g.cast(x if x.type.rank == 2 else g.reshape(x, (1, x.type.size)), DType.F32) for x in inputs]
    sizes = tuple(x.type.shape[1] for x in rows)
    require(not inputdimensions or inputdimensions == sizes, f"inputs of {list(sizes)} columns")
    return rows[0] if len(rows) == 1 else g(Concat(1), *rows)


def array_feature_extractor(g: Emitter, x: Value, indices: Value, /) -> Value:
    y = g.reshape(x, (1, x.type.size)) if x.type.rank == 1 else x
    return g(Gather(y.type.rank - 1), y, g.reshape(indices, (indices.type.size,)))


def one_hot_encoder(
    g: Emitter, x: Value, /, *, cats_int64s: tuple[int, ...] = (), cats_strings: tuple[str, ...] = (), zeros: int = 1
) -> Value:
    require(bool(zeros), "zeros=0 raises an error for an unknown category, which a GPU cannot")
    if cats_strings:
        cats_int64s, x = tuple(range(len(cats_strings))), codes(g, x, cats_strings, missing=-1)
    numbers = g.constant(np.array(cats_int64s, np.int64))
    wide = g.reshape(g.cast(x, DType.I64), (*x.type.shape, 1))
    return g(Cast(DType.F32), g(pw("cmp_eq"), wide, numbers))


def zip_map(
    g: Emitter,
    scores: Value,
    /,
    *,
    classlabels_int64s: tuple[int, ...] = (),
    classlabels_strings: tuple[str, ...] = (),
) -> Value:
    """Import ZipMap as nothing, because fusec has no maps: the scores stay one tensor, a column for each class."""
    labels = classlabels_int64s or classlabels_strings
    require(len(labels) == scores.type.shape[-1], f"{len(labels)} labels for {scores.type}")
    shown = ", ".join(map(str, labels[:SHOWN])) + (", ..." if len(labels) > SHOWN else "")
    g.note(f"the scores are one tensor and not a map for each row; its columns are the classes {shown}")
    return scores


TABLE: Mapping[str, OpFunction] = {
    "ArrayFeatureExtractor": array_feature_extractor,
    "Binarizer": binarizer,
    "FeatureVectorizer": feature_vectorizer,
    "Imputer": imputer,
    "Normalizer": normalizer,
    "OneHotEncoder": one_hot_encoder,
    "Scaler": scaler,
    "ZipMap": zip_map,
}
