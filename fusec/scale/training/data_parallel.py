"""Train on several devices: each worker computes gradients of its part of the batch, and all use their mean.

A step is two programs. The first one ends with the gradients, in a few blocks of memory (buckets). The workers replace
each bucket by its mean. The second program updates the parameters, which therefore stay equal on all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from fusec import driver
from fusec.builder import Builder
from fusec.errors import ExecutionError
from fusec.ir import Graph, quote
from fusec.ops import RandomBits
from fusec.runtime import Executable
from fusec.scale.communicator import Alone, Communicator
from fusec.scale.training.overlap import complete_after
from fusec.scale.training.split_step import HalfStep, SplitStep, split_step
from fusec.scale.training.state_blocks import StateBlock, blocks
from fusec.system.dataclass import dataclass

BUCKET_BYTES = 8 << 20  # of gradients: large enough for the links, and small enough that most are sent early


def data_parallel(
    builder: Builder,
    communicator: Communicator | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = False,
    **options: Any,
) -> DataParallel:
    """Compile the training step of a builder for one of several workers, each with its part of the batch.

    builder: loss, gradients (`fusec.backward`) and updates, for the part of the batch of one worker. The loss is a mean
        over the batch, so that the mean of the workers' gradients is the gradient of the whole batch.
    communicator: connects the workers; None: there is one.
    bucket_bytes: about as many bytes of gradients are sent in one message.
    overlap: send each bucket as soon as it is complete, while the backward pass goes on; it is then part of the CUDA
        graph. False: send all after it.
    options: options of `fusec.compile`.
    Raises ModelError if the update depends on the batch in another way than through the gradients.
    """
    return DataParallel(builder, communicator or Alone(), SendOptions(bucket_bytes, overlap), options)


@dataclass(frozen=True)
class SendOptions:
    """Options of sending gradients: see `data_parallel`."""

    bucket_bytes: int = BUCKET_BYTES
    overlap: bool = False


class DataParallel:
    """A training step of one worker. It has the calls of an Executable that training uses.

    programs: the two programs of a step. `Executable.share` takes each of them.
    state: inputs that stay on the device, with the outputs that replace them.
    buckets: the memory of the gradients, in the order in which it is sent.
    early: number of buckets that are sent before the backward pass ends.
    """

    def __init__(self, builder: Builder, communicator: Communicator, send: SendOptions, options: Mapping[str, Any]):
        self.communicator = communicator
        split = split_step(builder)
        backward = _compiled(split.backward, options)
        _set_orders(split.update.graph, backward)
        self.programs = backward, _compiled(split.update, options)
        self.state = {**backward.state, **self.programs[1].state}
        self._outputs = [name for name in builder.graph().output_names if name not in builder.updates.values()]
        placed = _place(self.programs, split, send.bucket_bytes)
        self.buckets, self._statistics = placed.buckets, placed.statistics
        self.bind(**{name: array for name, array in builder.parameters.items() if array is not None})
        for block in (*placed.rest, *placed.statistics):
            communicator.broadcast(block.memory)
        self._draw_other_numbers(backward.compiled.source)
        self.early = self._send_early() if send.overlap else 0

    def _send_early(self) -> int:
        """Send buckets from within the first program, as soon as they are complete; return how many."""
        backward = self.programs[0]
        program = backward.compiled.program
        complete = complete_after(program, backward.state, [list(bucket.parts) for bucket in self.buckets])
        actions: dict[int, list[Callable[[], None]]] = {}
        for bucket, index in zip(self.buckets, complete, strict=True):
            if index is not None:
                actions.setdefault(index, []).append(partial(self.communicator.start_mean, bucket.memory))
        if actions:
            actions.setdefault(len(program.steps) - 1, []).append(self.communicator.join)
            backward.after_steps({index: partial(_call_all, todo) for index, todo in actions.items()})
        return sum(index is not None for index in complete)

    def _draw_other_numbers(self, graph: Graph) -> None:
        """Give each worker its own random numbers, because each has other examples."""
        for node in graph.nodes:
            if isinstance(node.op, RandomBits) and node.operands[0].name in self.state:
                name = node.operands[0].name
                seed, step = self.value(name).tolist()
                first = (seed & 0xFFFFFFFF) | (self.communicator.rank << 32) ^ (seed >> 32 << 32)
                self.bind(**{name: np.array([first, step], np.uint64)})

    def bind(self, **arrays: Any) -> None:
        """Copy values of state to the device; see `Executable.bind`. All workers must bind the same values."""
        for name in arrays:
            if name not in self.state:
                raise ExecutionError(f"{quote(name)} is no state")
        for program in self.programs:
            program.bind(**{name: array for name, array in arrays.items() if name in program.state})

    def step(self, **feeds: Any) -> Any:
        """Run one step on this worker's part of the batch, and return the outputs that are no updates.

        They are of this part: `average` returns the mean over all workers.
        """
        backward, update = self.programs
        known = {spec.name for program in self.programs for spec in program.inputs}
        if unknown := sorted(feeds.keys() - known):
            raise ExecutionError(f"no input {quote(unknown[0])}")
        self.communicator.begin_step()
        found = _run(backward, feeds)
        for bucket in self.buckets[self.early :]:
            self.communicator.mean(bucket.memory)
        found |= _run(update, feeds)
        results = tuple(found[name] for name in self._outputs)
        return results[0] if len(results) == 1 else results

    def value(self, name: str) -> np.ndarray[Any, Any]:
        """Return the value of state, on the host."""
        return next((p for p in self.programs if name in p.state), self.programs[0]).value(name)

    def average(self, number: Any) -> float:
        """Return the mean of a number, such as the loss, over all workers. All workers must call it."""
        xp = self.programs[0].backend.xp
        block = xp.asarray(number, np.float32).reshape(1).copy()
        self.communicator.mean(block)
        return float(block[0])

    def average_statistics(self) -> None:
        """Replace running statistics, such as those of batch norms, by their mean over all workers.

        Each worker updates its own during training. Call it on all workers before you evaluate or save the model.
        """
        for block in self._statistics:
            if block.memory.dtype.kind != "u" and block.memory.dtype.kind != "i":
                self.communicator.mean(block.memory)


@dataclass(frozen=True)
class _Placed:
    """Blocks of the gradients, of state that each worker updates from its batch, and of all other state."""

    buckets: list[StateBlock]
    statistics: list[StateBlock]
    rest: list[StateBlock]


def _place(programs: tuple[Executable, Executable], split: SplitStep, bucket_bytes: int) -> _Placed:
    """Place the state of both programs in blocks. What both have, they share."""
    types = {v.name: v.type for p in programs for v in p.compiled.graph.inputs if v.name in p.state}
    own = {name for name, output in split.backward.state.items() if output} - set(split.gradients)
    xp = programs[0].backend.xp
    last_first = [(name, types[name]) for name in reversed(split.gradients)]  # as the backward pass computes them
    turn = {name: number for number, (name, _) in enumerate(last_first)}
    buckets = sorted(blocks(xp, last_first, bucket_bytes), key=lambda bucket: max(turn[name] for name in bucket.parts))
    placed = _Placed(
        buckets,
        blocks(xp, [(name, types[name]) for name in types if name in own]),
        blocks(xp, [(name, types[name]) for name in types if name not in own and name not in split.gradients]),
    )
    memory = {n: a for block in (*placed.buckets, *placed.statistics, *placed.rest) for n, a in block.parts.items()}
    for program in programs:
        program.place_state({name: memory[name] for name in program.state})
    return placed


def _compiled(half: HalfStep, options: Mapping[str, Any]) -> Executable:
    return cast("Executable", driver.compile(half.graph, state=half.state, **options))


def _set_orders(update: Graph, backward: Executable) -> None:
    """Give state the memory order that the first program chose, also to what has the shape of its filters."""
    state = [v for v in backward.compiled.graph.inputs if v.name in backward.state]
    by_name = {v.name: v.type.order for v in state}
    by_shape = {v.type.shape: v.type.order for v in state}
    for value in update.inputs:
        order = by_name.get(value.name, by_shape.get(value.type.shape, ()))
        if order:
            update.set_type(value, value.type.with_order(order))


def _run(program: Executable, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run a program on those of the feeds that it reads, and return the outputs that are no updates."""
    replaced = set(program.state.values())
    wanted = [spec.name for spec in program.outputs if spec.name not in replaced]
    own = {spec.name for spec in program.inputs} - program.state.keys()
    results = program.run(wanted, {name: array for name, array in feeds.items() if name in own})
    return dict(zip(wanted, results, strict=True))


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
