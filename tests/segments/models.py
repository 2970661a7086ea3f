"""Small models whose shapes or branches depend on values, by the op that they are about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from frontends.onnx.models import info, model
from onnx import TensorProto, helper

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Arrays = Mapping[str, np.ndarray]
RNG = np.random.default_rng(7)


def n(text: str, **attributes: Any) -> onnx.NodeProto:
    """Make a node of `Op operands -> results`; `_` is an operand that is left out."""
    operands, _, results = text.partition(" -> ")
    op, *names = operands.split()
    return helper.make_node(op, ["" if name == "_" else name for name in names], results.split(), **attributes)


@dataclass(frozen=True)
class Case:
    """A model with several sets of inputs. `steps`: host steps of each call, in order."""

    proto: onnx.ModelProto
    feeds: tuple[Arrays, ...]
    steps: tuple[str, ...]


def _of(nodes: list[onnx.NodeProto], *inputs: onnx.ValueInfoProto, **more: Any) -> onnx.ModelProto:
    outputs = more.pop("outputs", ["y"])
    held = more.pop("held", {})
    return model(nodes, list(inputs), [info(o, None, d) for o, d in _typed(outputs)], held, **more)


def _typed(outputs: object) -> list[tuple[str, int]]:
    return [o if isinstance(o, tuple) else (o, FLOAT) for o in outputs]  # type: ignore[attr-defined]


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def positive(nodes: list[onnx.NodeProto], **more: Any) -> onnx.ModelProto:
    """Make a model that first computes p, where x is positive."""
    first = [n("Neg x -> m"), n("Less m zero -> p")]
    held = {"zero": np.array(0, np.float32), **more.pop("held", {})}
    return _of([*first, *nodes], info("x", [4, 5]), held=held, **more)


X = tuple({"x": floats(4, 5) + shift} for shift in (0, 1, -1, 9, -9))


def non_zero() -> Case:
    """Gather what NonZero finds, and count it."""
    nodes = [
        n("NonZero p -> nz"),
        n("Transpose nz -> at"),
        n("GatherND x at -> found"),
        n("Relu found -> y"),
        n("Shape nz -> s"),
    ]
    return Case(positive(nodes, outputs=["y", ("s", INT), ("nz", INT)]), X, ("NonZero",))


def compress_all() -> Case:
    nodes = [
        n("Reshape p flat -> c"),
        n("Compress x c -> picked"),
        n("Exp picked -> y"),
    ]
    return Case(positive(nodes, held={"flat": ints(-1)}), X, ("Compress",))


def compress_rows() -> Case:
    nodes = [
        n("ReduceSum x one -> sum", keepdims=0),
        n("Greater sum zero -> c"),
        n("Compress x c -> picked", axis=0),
        n("Softmax picked -> y"),
    ]
    return Case(positive(nodes, held={"one": ints(1)}), X, ("Compress",))


def unique(sorted: int, axis: int | None) -> Case:
    more = {} if axis is None else {"axis": axis}
    nodes = [
        n("Round x -> r"),
        n("Unique r -> u first inverse counts", sorted=sorted, **more),
        n("Neg u -> y"),
        n("Gather u inverse -> again", axis=axis or 0),
    ]
    rows = np.repeat(floats(2, 5), 2, axis=0)[[0, 2, 1, 3]]
    proto = positive(nodes, outputs=["y", ("first", INT), ("inverse", INT), ("counts", INT), "again"])
    return Case(proto, (*X, {"x": rows}), ("Unique",))


def unique_twice() -> Case:
    """Give the result of one host step to another."""
    nodes = [
        n("Round x -> r"),
        n("Unique r -> u"),
        n("Abs u -> a"),
        n("Unique a -> v"),
        n("Neg v -> y"),
    ]
    return Case(positive(nodes), X, ("Unique", "Unique"))


def count_of(op: str, operands: str, before: tuple[onnx.NodeProto, ...] = (), **more: Any) -> Case:
    """Make a model in which the op has an operand `k` of one element, made of the number of positive elements."""
    nodes = [
        n("Cast p -> i", to=INT),
        n("ReduceSum i -> count", keepdims=0),
        n("Reshape count flat -> k"),
        *before,
        n(f"{op} {operands} -> z", **more.pop("attributes", {})),
        n("Mul z z -> y"),
    ]
    held = {"flat": ints(1), **more.pop("held", {})}
    return Case(positive(nodes, held=held, **more), X, (op,))


def _joined(*parts: str) -> onnx.NodeProto:
    return n(f"Concat {' '.join(parts)} -> operand", axis=0)


def boxes_of(batch: int, classes: int, boxes: int) -> list[Arrays]:
    corners = RNG.uniform(0, 10, (batch, boxes, 2))
    sizes = RNG.uniform(0.5, 6, (batch, boxes, 2))
    return [
        {
            "boxes": np.concatenate([corners, corners + sizes], -1).astype(np.float32),
            "scores": (RNG.uniform(0, 1, (batch, classes, boxes)) + shift).astype(np.float32),
        }
        for shift in (0, 0.3, -0.6, -2)
    ]


def suppression(center: int) -> Case:
    nodes = [
        n("Mul boxes scale -> b"),
        n("Sigmoid scores -> s"),
        n("NonMaxSuppression b s most iou least -> rows", center_point_box=center),
        n("Cast rows -> y", to=FLOAT),
    ]
    held = {
        "scale": np.array(2, np.float32),
        "most": ints(4),
        "iou": np.array([0.4], np.float32),
        "least": np.array([0.55], np.float32),
    }
    proto = _of(nodes, info("boxes", [2, 30, 4]), info("scores", [2, 3, 30]), held=held, outputs=["y", ("rows", INT)])
    return Case(proto, tuple(boxes_of(2, 3, 30)), ("NonMaxSuppression",))


def branches() -> Case:
    """Choose between branches of other shapes."""
    then = helper.make_graph([n("Relu x -> a")], "then", [], [info("a", None)])
    other = helper.make_graph([n("ReduceMax x -> b", keepdims=0)], "other", [], [info("b", None)])
    nodes = [
        n("ReduceSum x -> sum", keepdims=0),
        n("Less sum zero -> c"),
        n("If c -> z", then_branch=then, else_branch=other),
        n("Neg z -> y"),
    ]
    return Case(positive(nodes), X, ("If",))


def branch_with_host_step() -> Case:
    """Find a host step within the branch that is taken."""
    then = helper.make_graph([n("NonZero x -> a"), n("Cast a -> af", to=FLOAT)], "then", [], [info("af", None)])
    other = helper.make_graph([n("Relu x -> b")], "other", [], [info("b", None)])
    nodes = [
        n("ReduceSum x -> sum", keepdims=0),
        n("Less sum zero -> c"),
        n("If c -> z", then_branch=then, else_branch=other),
        n("Neg z -> y"),
    ]
    return Case(positive(nodes), X[:3], ())


def loop_of_computed_count() -> Case:
    body = helper.make_graph(
        [n("Add v x -> next"), n("Identity go -> on"), n("Neg next -> row")],
        "body",
        [info("i", [], INT), info("go", [], BOOL), info("v", None)],
        [info("on", [], BOOL), info("next", None), info("row", None)],
    )
    nodes = [
        n("Cast p -> int", to=INT),
        n("ReduceSum int -> count", keepdims=0),
        n("Add count more -> n"),
        n("Loop n _ x -> last rows", body=body),
        n("Relu rows -> y"),
    ]
    return Case(positive(nodes, held={"more": np.array(1)}, outputs=["y", "last"]), X[:3], ("Loop",))


def loop_until() -> Case:
    """Multiply by a weight until the sum is large: the body computes the condition, and reads x and m from outside."""
    body = helper.make_graph(
        [
            n("MatMul v w -> product"),
            n("Abs product -> size"),
            n("Add size x -> next"),
            n("Sub next m -> row"),
            n("ReduceSum next -> sum", keepdims=0),
            n("Less sum limit -> on"),
        ],
        "body",
        [info("i", [], INT), info("go", [], BOOL), info("v", None)],
        [info("on", [], BOOL), info("next", None), info("row", None)],
    )
    nodes = [n("Loop _ _ x -> last rows", body=body), n("Relu rows -> y")]
    held = {"w": np.abs(floats(5, 5)), "limit": np.array(400, np.float32)}
    return Case(positive(nodes, held=held, outputs=["y", "last"]), X, ("Loop",))


def loop_with_host_step() -> Case:
    """Keep the positive elements of a list that shrinks, until few are left: each trip has another shape."""
    body = helper.make_graph(
        [
            n("Greater v zero -> large"),
            n("Compress v large -> kept", axis=0),
            n("Sub kept step -> next"),
            n("Size kept -> count"),
            n("Greater count few -> on"),
        ],
        "body",
        [info("i", [], INT), info("go", [], BOOL), info("v", None)],
        [info("on", [], BOOL), info("next", None), info("count", None, INT)],
    )
    nodes = [n("Reshape x all -> v0"), n("Loop most _ v0 -> last counts", body=body), n("Relu last -> y")]
    held = {"all": ints(-1), "most": np.array(50), "step": np.array(0.3, np.float32), "few": np.array(3)}
    return Case(positive(nodes, held=held, outputs=["y", ("counts", INT)]), X, ("Loop",))


def loop_of_a_found_number() -> Case:
    """Add a number in a loop: a constant of the segment, but another one in each call, since a length gives it."""
    body = helper.make_graph(
        [n("Add v found -> next"), n("ReduceSum next -> sum", keepdims=0), n("Less sum limit -> on")],
        "body",
        [info("i", [], INT), info("go", [], BOOL), info("v", None)],
        [info("on", [], BOOL), info("next", None)],
    )
    nodes = [
        n("NonZero p -> nz"),
        n("Size nz -> count"),
        n("Cast count -> number", to=FLOAT),
        n("Add number one -> found"),
        n("Loop most _ x -> last", body=body),
        n("Relu last -> y"),
    ]
    held = {"limit": np.array(2000, np.float32), "one": np.array(1, np.float32), "most": np.array(30)}
    return Case(positive(nodes, held=held), X, ("NonZero", "Loop"))


def sequence_position() -> Case:
    nodes = [
        n("Cast p -> i", to=INT),
        n("ReduceMax i -> at", keepdims=0),
        n("SequenceConstruct x m -> list"),
        n("SequenceAt list at -> z"),
        n("Relu z -> y"),
    ]
    return Case(positive(nodes), X, ("SequenceAt",))


def given_axis() -> Case:
    """Read the axis from an input of the model: there is nothing to compute before the host step."""
    nodes = [n("CumSum x axis -> s"), n("Relu s -> y")]
    proto = _of(nodes, info("x", [4, 5]), info("axis", [], INT))
    return Case(proto, tuple({"x": floats(4, 5), "axis": np.array(a)} for a in (0, 1, -1)), ("CumSum",))


CASES: Mapping[str, Callable[[], Case]] = {
    "non_zero": non_zero,
    "compress_all": compress_all,
    "compress_rows": compress_rows,
    "unique": lambda: unique(1, None),
    "unique_unsorted": lambda: unique(0, None),
    "unique_rows": lambda: unique(1, 0),
    "unique_columns": lambda: unique(0, 1),
    "unique_twice": unique_twice,
    "non_max_suppression": lambda: suppression(0),
    "non_max_suppression_centred": lambda: suppression(1),
    "slice_end": lambda: count_of(
        "Slice", "flatx nil k", before=(n("Reshape x all -> flatx"),), held={"all": ints(-1), "nil": ints(0)}
    ),
    "slice_start": lambda: count_of(
        "Slice", "x k top axes steps", held={"top": ints(-9), "axes": ints(1), "steps": ints(-1)}
    ),
    "slice_axes": lambda: count_of(
        "Slice",
        "x nil two operand",
        before=(n("Clip k lo hi -> operand"),),
        held={"nil": ints(0), "two": ints(2), "lo": np.array(0), "hi": np.array(1)},
    ),
    "reshape": lambda: count_of(
        "Reshape",
        "flatx operand",
        before=(n("Mul k nil -> none"), n("Add none four -> r"), _joined("r", "rest"), n("Neg x -> flatx")),
        held={"nil": ints(0), "four": ints(2), "rest": ints(-1)},
    ),
    "expand": lambda: count_of(
        "Expand",
        "x operand",
        before=(n("Add k four -> r"), _joined("r", "one", "one")),
        held={"four": ints(1), "one": ints(1)},
    ),
    "tile": lambda: count_of("Tile", "x operand", before=(_joined("k", "one"),), held={"one": ints(2)}),
    "resize_sizes": lambda: count_of(
        "Resize",
        "image _ _ operand",
        before=(n("Unsqueeze x ax -> image"), n("Add k one -> r"), _joined("one", "one", "r", "r")),
        held={"ax": ints(0, 1), "one": ints(1)},
        attributes={"mode": "linear"},
    ),
    "resize_roi": lambda: count_of(
        "Resize",
        "x operand _ sizes",
        before=(
            n("Cast k -> whole", to=FLOAT),
            n("Div whole many -> part"),
            _joined("start", "start", "part", "end"),
        ),
        held={
            "many": np.array([40], np.float32),
            "start": np.array([0.1], np.float32),
            "end": np.array([0.9], np.float32),
            "sizes": ints(3, 7),
        },
        attributes={"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"},
    ),
    "range": lambda: count_of(
        "Range", "nil count one", held={"nil": np.array(-2), "one": np.array(3)}, outputs=[("y", INT)]
    ),
    "constant_of_shape": lambda: count_of("ConstantOfShape", "k"),
    "top_k": lambda: Case(
        positive(
            [
                n("Cast p -> i", to=INT),
                n("ReduceMax i -> top", keepdims=0),
                n("Add top one -> n"),
                n("Reshape n flat -> k"),
                n("TopK x k -> v at"),
                n("Neg v -> y"),
            ],
            held={"flat": ints(1), "one": np.array(1)},
            outputs=["y", ("at", INT)],
        ),
        X,
        ("TopK",),
    ),
    "pad": lambda: count_of("Pad", "x operand", before=(_joined("k", "nil", "nil", "k"),), held={"nil": ints(0)}),
    "one_hot": lambda: count_of(
        "OneHot",
        "classes operand values",
        before=(n("Add k one -> operand"),),
        held={"classes": ints(0, 1, 2), "one": ints(1), "values": np.array([0, 1], np.float32)},
    ),
    "cum_sum": given_axis,
    "if": branches,
    "if_with_host_step": branch_with_host_step,
    "loop": loop_of_computed_count,
    "loop_until": loop_until,
    "loop_of_a_found_number": loop_of_a_found_number,
    "loop_with_host_step": loop_with_host_step,
    "sequence": sequence_position,
}
