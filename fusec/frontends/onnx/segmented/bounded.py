"""Join a model that is split at one bounded result into one program, if all that follows keeps its rows separate.

The rows of such a result (of NonMaxSuppression) are on the device, and their number is known after a call only. The
program computes as many rows as there can be. The host then reads the number, and crops the results of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusec.errors import ModelError
from fusec.frontends.onnx.importer import Bound, Importer
from fusec.frontends.onnx.segmented.segments import Held, HostStep, Segment, SegmentedModel, Slot, Slots
from fusec.frontends.padding_proof import Crop, crops
from fusec.ir import DType, Graph, Literal, TensorType

# Elements after the bounded result; computing more for rows that do not count may take longer than a host step.
MAX_ELEMENTS = 1 << 22


def joined(
    model: SegmentedModel, first: Graph | Segment, shapes: Mapping[str, Sequence[int]], bound: Mapping[str, Bound]
) -> Graph | Segment:
    """Return the segment that computes all of the model, if the first one ends at a bounded result and this is proven.

    first: the first segment, or the graph of a model without host steps; it is returned where nothing is proven.
    shapes, bound: as the first segment was imported with.
    """
    if isinstance(first, Graph) or len(first.steps) != 1 or not first.steps[0].crops:
        return first
    step = first.steps[0]
    cropped = _crops_of_outputs(first, step)
    if cropped is None:
        return first
    importer = model.importer()
    importer.emit.whole = True
    importer.begin(shapes, bound)
    importer.nodes(model.model.order, model.model.names)
    if importer.asked or importer.problems or len(importer.emit.counts) != 1:
        return first
    return _cropped_segment(importer, step, cropped)


def _crops_of_outputs(first: Segment, step: HostStep) -> dict[str, Crop] | None:
    """Return how each output of the model is cropped if all rows are computed; None if rows could depend on others."""
    if step.most < 3:  # with one row, a dim of size 1 may be taken for the rows
        return None
    try:
        small, large = (
            first.following([(TensorType((rows, *_row_shape(first, step)), DType.I64),)])
            for rows in (step.most - 1, step.most)
        )
        if small.steps or large.steps or small.graph is None or large.graph is None:
            return None
        (rows,) = large.host_inputs[step.index]
        if sum(value.type.size for value in large.graph.values() if value.literal is None) > MAX_ELEMENTS:
            return None
        made = crops(small.graph, large.graph, {rows: [0]}, step.most - 1, step.most)
    except ModelError:
        return None
    known = dict(zip(large.graph.output_names, made, strict=True)) | {rows: step.crops[0][1]}
    found: dict[str, Crop] = {}
    for name, one in large.results.items():
        if not _same(small.results.get(name), one):
            return None
        found[name] = known.get(one.name, Crop()) if isinstance(one, Slot) else Crop()
    return found


def _row_shape(first: Segment, step: HostStep) -> tuple[int, ...]:
    """Return the shape of a row of the bounded result."""
    assert first.graph is not None
    at = first.graph.output_names.index(step.crops[0][0])
    return first.graph.outputs[at].type.shape[1:]


def _same(small: Held | None, large: Held) -> bool:
    """Tell if an output is the same tensor, or an equal constant, for two numbers of rows."""
    if isinstance(small, Slot) and isinstance(large, Slot):
        return small.name == large.name
    if isinstance(small, Literal) and isinstance(large, Literal):
        return small.type == large.type and small.array.tobytes() == large.array.tobytes()
    return False


def _cropped_segment(importer: Importer, step: HostStep, cropped: Mapping[str, Crop]) -> Segment:
    """Return the segment of a whole model. The host reads the number of rows after it, and crops its results."""
    slots = Slots(importer.graph)
    held: dict[str, Held] = {}
    for name in cropped:
        value = importer.value(name)
        assert value is not None
        held[name] = slots.held(value, name)
    (count,) = importer.emit.counts
    number = slots.one(count, count.name)
    assert isinstance(number, Slot)
    found = {one.name: cropped[name] for name, one in held.items() if isinstance(one, Slot) and cropped[name].steps}
    importer.close(list(slots.made), [slot.name for slot in slots.made.values()])
    inputs = tuple(Slot(value.name, value.type) for value in importer.graph.inputs)
    last = Segment(inputs, None, {step.index: tuple(found)}, (), (), held, _nothing_follows)
    reading = replace(step, reads=(number.name,), crops=tuple(found.items()))
    return Segment(inputs, importer.graph, {}, (reading,), (), held, lambda answers: last)


def _nothing_follows(answers: object) -> Segment:
    raise AssertionError("the last segment has no host steps")
