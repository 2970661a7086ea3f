"""Run batches of one model whose arrays are in shared memory. On a GPU, a batch starts before the last one is done.

On the host, batches run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import DType
from fusec.scale.shared_block import Record, SharedBlock, layout

if TYPE_CHECKING:
    from fusec.scale.model_recipe import Runnable

Feeds = Mapping[str, Any]
Slots = Sequence[tuple[SharedBlock, SharedBlock]]
Upload = Callable[[int, Sequence[SharedBlock], Feeds], Callable[[], Feeds]]
Download = Callable[[SharedBlock, Sequence[np.ndarray[Any, Any]], Sequence[Any]], Callable[[], None]]
Transfer: TypeAlias = tuple[Upload, Download]
Results = Callable[[], list[Record]]  # waits for the results of a batch, and returns their records


def transfer_for(model: Runnable) -> Transfer | None:
    """Return the copies to and from the GPU of a model; None for a model whose batches cannot start ahead."""
    from fusec.runtime import Executable

    if not isinstance(model, Executable) or model.backend.xp is np:
        return None
    from fusec.scale.device_transfer import DeviceDownload, DeviceUpload  # needs CuPy

    return DeviceUpload(), DeviceDownload()


class BatchRunner:
    """Runs batches of one model.

    slots: for each batch that may be in flight, the blocks of its inputs and of its results.
    lent: blocks that the caller of the pool fills, in place of a slot's inputs.
    transfer: copies inputs to the device ahead of their run, and results from there; None on the host.
    """

    def __init__(
        self, model: Runnable, slots: Slots, lent: Sequence[SharedBlock], transfer: tuple[Upload, Download] | None
    ):
        self.model = model
        self.slots, self.lent = slots, lent
        self._upload, self._download = transfer or (None, None)
        self._names = [spec.name for spec in model.inputs]
        self._is_plain = all(map(_is_plain, model.outputs))

    @property
    def starts_ahead(self) -> bool:
        """Tell if a batch may start before the one before it is done."""
        return self._download is not None

    def ahead(self, job: Mapping[str, Any]) -> Callable[[], Feeds]:
        """Read the inputs of a batch and start their way to the device; return a function that waits for them."""
        own = self.slots[job["slot"]][0]
        blocks = [own if number < 0 else self.lent[number] for _, number, _ in job["inputs"]]
        records = [record for _, _, record in job["inputs"]]
        feeds = self._named(job, [b.views([record])[0] for b, record in zip(blocks, records, strict=True)])
        if self._upload is None:
            return lambda: feeds
        return self._upload(job["slot"], blocks, feeds)

    def _named(self, job: Mapping[str, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> Feeds:
        given = [name for name, _, _ in job["inputs"]]
        free = [name for name in self._names if name not in given]
        if given.count(None) > len(free):
            raise ExecutionError(f"{len(arrays)} arrays for {len(self._names)} inputs: {', '.join(self._names)}")
        places = iter(free)
        return {next(places) if name is None else name: array for name, array in zip(given, arrays, strict=True)}

    def start(self, job: Mapping[str, Any], feeds: Feeds) -> Results:
        """Run a batch, on a device without waiting for it; return a function that waits for its results."""
        from fusec.runtime import Executable

        block = self.slots[job["slot"]][1]
        if not isinstance(self.model, Executable):
            records = block.put([np.asarray(array) for array in self.model.run(None, dict(feeds))])
            return lambda: records
        specs = self.model.outputs  # their shapes are known, so that results need no copy
        records = layout([(spec.dtype, spec.shape) for spec in specs])
        places = block.views(records)
        if self._download is not None and self._is_plain and not all(map(_on_host, feeds.values())):
            return _after(self._download(block, places, self.model.run(None, feeds)), records)
        self.model.run(None, feeds, out={spec.name: place for spec, place in zip(specs, places, strict=True)})
        return lambda: records


def _on_host(array: Any) -> bool:
    return isinstance(array, np.ndarray)


def _is_plain(spec: Any) -> bool:
    """Tell if CuPy has the type of an output."""
    return spec.dtype is not None and not DType.of(spec.dtype).is_narrow and spec.dtype.name != "bfloat16"


def _after(wait: Callable[[], None], records: list[Record]) -> Results:
    def waited() -> list[Record]:
        wait()
        return records

    return waited
