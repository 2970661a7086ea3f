"""Run a model over any number of rows: split them into batches, and join the results.

A row is one example along the first dim of every input and output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import quote
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from fusec.scale.batch_pipeline import BatchPipeline
    from fusec.scale.model_recipe import Runnable

Rows = Mapping[str, np.ndarray[Any, Any]]
SYMBOLIC = 64  # rows of a batch, for a model that takes any number


@dataclass(frozen=True)
class BatchOptions:
    """Options of batches.

    rows: rows of a batch, for a model with a symbolic first dim; a fixed first dim is the number of rows itself.
    pad: fill the last batch by repeating its last row, and drop these results. It is for models whose results of a
        row depend on that row alone; a model with `buckets` is padded after a proof of that, and needs no `pad`.
    """

    rows: int = SYMBOLIC
    pad: bool = False


def run_rows(
    pipeline: BatchPipeline, rows: Rows, options: BatchOptions | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Run a model over rows, and return the rows of each output by name.

    Raises ExecutionError if inputs have different numbers of rows, or an output has not one row for each. Also if the
    last batch is incomplete without `pad`.
    """
    options, model = options or BatchOptions(), pipeline.model
    rows = {spec.name: rows[spec.name] for spec in model.inputs if spec.name in rows}
    count = _count(rows)
    if not count:
        return {spec.name: np.empty((0, *row_shape(spec)), spec.dtype) for spec in model.outputs}
    size, fixed = _batch_size(model, options)
    found: list[np.ndarray[Any, Any]] = []
    starts = iter(range(0, count, size))

    def batches() -> Iterator[Rows]:
        for first in range(0, count, size):
            part = {name: np.asarray(array[first : first + size]) for name, array in rows.items()}
            if fixed and first + size > count:
                part = {name: _padded(name, array, size, options.pad) for name, array in part.items()}
            yield part

    def take(results: Sequence[np.ndarray[Any, Any]]) -> None:
        first = next(starts)
        used = min(size, count - first)
        for spec, result in zip(model.outputs, results, strict=True):
            if result.ndim == 0 or result.shape[0] != (size if fixed else used):
                raise ExecutionError(
                    f"output {quote(spec.name)} has the shape {list(result.shape)}: no row for each input"
                )
        if not found:
            found.extend(np.empty((count, *result.shape[1:]), result.dtype) for result in results)
        for spec, whole, result in zip(model.outputs, found, results, strict=True):
            if result.shape[1:] != whole.shape[1:]:
                raise ExecutionError(
                    f"output {quote(spec.name)} has rows of the shapes {list(whole.shape[1:])} and "
                    f"{list(result.shape[1:])}, which cannot be joined"
                )
            whole[first : first + used] = result[:used]

    pipeline.run(batches(), take)
    return dict(zip((spec.name for spec in model.outputs), found, strict=True))


def row_shape(spec: Any) -> tuple[int, ...]:
    """Return the shape of a row of an input or output. Raises ExecutionError if it is not known before a run."""
    shape = spec.shape
    if not shape or not all(isinstance(d, int) for d in shape[1:]):
        raise ExecutionError(f"{quote(spec.name)} has the shape {shape}, so the shape of a row is not known")
    return tuple(shape[1:])


def _count(rows: Rows) -> int:
    counts = {name: len(array) if array.ndim else 0 for name, array in rows.items()}
    if len(set(counts.values())) != 1:
        raise ExecutionError(f"inputs need the same number of rows, not {counts}")
    return next(iter(counts.values()))


def _batch_size(model: Runnable, options: BatchOptions) -> tuple[int, bool]:
    """Return the rows of a batch, and if the model takes no other number."""
    dims = {spec.shape[0] if spec.shape else None for spec in model.inputs}
    sizes = {d for d in dims if isinstance(d, int)}
    if None in dims or len(sizes) > 1:
        shapes = ", ".join(f"{quote(spec.name)} {spec.shape}" for spec in model.inputs)
        raise ExecutionError(f"the inputs have no first dim in common for rows: {shapes}")
    if options.rows < 1:
        raise ExecutionError(f"a batch of {options.rows} rows: it needs 1 or more")
    return (sizes.pop(), True) if sizes else (options.rows, False)


def _padded(name: str, array: np.ndarray[Any, Any], size: int, pad: bool) -> np.ndarray[Any, Any]:
    if not pad:
        raise ExecutionError(
            f"the last batch of {quote(name)} has {len(array)} rows, and the model takes {size}. Give pad=True if the "
            "results of a row depend on that row alone, or compile with a range or buckets for the first dim"
        )
    return np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])
