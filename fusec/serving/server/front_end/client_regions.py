"""Use shared memory of clients in a front end: inputs that requests refer to, and outputs that are written there."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fusec.serving.server.frames import AnswerTensor
from fusec.serving.server.front_end.infer_request import GivenTensor, InferRequest, WantedOutput
from fusec.serving.server.front_end.worker_link import WorkerLink
from fusec.serving.server.memory.shared_regions import MappedRegions, RegionError, RegionRegistry
from fusec.serving.server.request_frames import RequestForm


class ClientRegions:
    """The regions of a server, which front ends have in common, and the objects that this one has mapped."""

    def __init__(self, folder: Path, allowed: bool, links: Sequence[WorkerLink]):
        """Take the folder of the list. allowed: by the owner of the server. links: to all workers."""
        self._registry, self._mapped = RegionRegistry(folder), MappedRegions(np)
        self._allowed, self._links = allowed, links

    @property
    def registry(self) -> RegionRegistry:
        """Return the list of regions. Raises RegionError if the owner of the server did not allow any."""
        if not self._allowed:
            raise RegionError("this server does not use shared memory of clients: it runs without --shared-memory")
        return self._registry

    def describe(self, name: str) -> list[dict[str, Any]]:
        """Return a region, or all without a name, as the extension writes them."""
        return [
            {key: value for key, value in asdict(region).items() if key != "identity"}
            for region in self.registry.regions(name)
        ]

    def unregister(self, name: str) -> None:
        """Remove a region, or all without a name. Workers unmap the objects."""
        for region in self.registry.unregister(name):
            for link in self._links:
                link.forget(region.identity)

    def unmap_removed(self) -> None:
        """Unmap objects that another front end was asked to remove."""
        if self._mapped:
            self._mapped.keep({region.identity for region in self._registry.regions()})

    def form(self, asked: InferRequest) -> bytes:
        """Return the form of a request with its objects. Raises RegionError if an output has no room."""
        for wanted in asked.outputs:
            self._place(wanted, wanted.room)
        items = (self.registry.find(each.region).identity if each.region else "" for each in asked.inputs)
        return _form(asked.form, tuple(items))

    def start(self, tensor: GivenTensor) -> int:
        """Return where an input starts in its object. Raises RegionError if its region has no such bytes."""
        return self.registry.find(tensor.region).start(tensor.start, tensor.nbytes)

    def write(self, asked: InferRequest, tensors: Mapping[str, AnswerTensor]) -> None:
        """Write outputs to their regions. Raises RegionError if there is no room for one."""
        for wanted in asked.outputs:
            data = tensors[wanted.name].data
            if (place := self._place(wanted, len(data))) is not None:
                place[:] = data

    def _place(self, wanted: WantedOutput, nbytes: int) -> memoryview | None:
        if not wanted.region:
            return None
        if nbytes > wanted.room:
            raise RegionError(
                f"output {wanted.name!r} has {nbytes} bytes, but shared_memory_byte_size is {wanted.room}"
            )
        region = self.registry.find(wanted.region)
        start = region.start(wanted.offset, nbytes)
        return self._mapped.memory(region.identity, start + nbytes).data[start : start + nbytes]


@functools.lru_cache(maxsize=1024)  # a client uses the same regions again and again
def _form(form: RequestForm, items: tuple[str, ...]) -> bytes:
    inputs = [(*given[:3], item) for given, item in zip(form.inputs, items, strict=True)]
    return replace(form, inputs=tuple(inputs)).text()
