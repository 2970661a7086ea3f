"""Compile kernels while cuDNN's workers start: those that a program will need if cuDNN accepts what fusec proposes.

Until then, most cores of a machine have nothing else to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from fusec.execution.compilation import Compiled
from fusec.gpu.autotune.candidates.candidate_times import StepTuning, candidate_kernels, kernels_of
from fusec.gpu.autotune.step_choices import apply_choices, before_choices
from fusec.gpu.cudnn.legality.judges import RulesJudge
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.without_driver.deviceless import nvrtc_libraries
from fusec.gpu.kernels import GpuFigures
from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.launch.cubins import compile_ahead
from fusec.ir import DType, Graph
from fusec.ops import Concat
from fusec.passes.base import Options
from fusec.passes.partition import Judge, partition
from fusec.passes.partition.concat_in_place import concat_in_place
from fusec.passes.partition.strict_rounding import StrictRounding
from fusec.system.dataclass import dataclass
from fusec.targets.target import Target

if TYPE_CHECKING:
    from fusec.gpu.autotune.cache.tuning_cache import TuningCache  # needs cupy and cudnn

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProposedKernels:
    """Kernels of a graph whose partition is proposed by fusec's rules alone.

    state: inputs that stay on the device, with the outputs that replace them
    level: the tuning level; with `none`, kernels have one variant
    """

    graph: Graph
    target: Target
    options: Options
    state: Mapping[str, str]
    level: str

    def start(self) -> threading.Thread:
        """Begin to compile them. The graph must not change until the thread ends that is returned.

        It ends when all kernels are known; child processes compile them. The graph keeps them, so that tuning finds
        those of its own steps. Then another thread loads what choosing plans needs. At the same time it would hold
        Python's lock, and processes would begin later.
        """
        changes = any(isinstance(node.op, Concat) for node in self.graph.nodes)  # types of what a concat joins
        graph = self.graph.clone() if changes else self.graph
        thread = threading.Thread(target=self._work, args=(graph,), name="fusec-ahead", daemon=True)
        thread.start()
        return thread

    def _work(self, graph: Graph) -> None:
        _quietly(partial(self.compile, graph))
        types = frozenset(value.type.dtype for value in graph.values())
        warm_up = partial(self.warm_up, types)
        threading.Thread(target=_quietly, args=(warm_up,), name="fusec-warm-up", daemon=True).start()

    def warm_up(self, types: frozenset[DType]) -> None:
        """Load what choosing plans needs, with the types of the graph's values: see `warm_up.warm_up`."""
        from fusec.gpu.warm_up import warm_up  # needs cuDNN and CuPy

        if self.level != "none":
            warm_up(self.options.storage, types)

    def compile(self, graph: Graph) -> None:
        """Partition the graph by fusec's rules, and begin to compile the kernels of all candidates."""
        options, figures = self.options, GpuFigures.of(self.target)
        judge: Judge = RulesJudge(options.tensor_cores)
        judge = StrictRounding(judge) if options.as_source else judge
        program = partition(graph, judge, self.target, None, self.state)
        program = concat_in_place(program, judge, options)
        if options.as_source or self.level == "none":
            found = kernels_of(apply_choices(program, {}, figures, options.as_source), figures)
        else:
            program = before_choices(program, figures, options.as_source)
            tuning = StepTuning(options.tensor_cores, self.target.launch_us, self.level, figures)
            offered = candidate_kernels(program, tuning).values()
            found = [variant for kernel in offered for variant in variants_of(kernel)]
        compile_ahead(found, self.target.sm, nvrtc_libraries())


@contextmanager
def candidates_compiled_ahead(compiled: Compiled, cache: TuningCache) -> Generator[None]:
    """Compile the kernels that will compete for the steps of a program, in a thread during the body and after it.

    cache: what it knows is not compiled.
    """
    from fusec.gpu.launch.kernel_launcher import load_ahead  # needs CuPy

    def work() -> None:
        unknown = (kernel for kernel in compiled.candidate_kernels.values() if not cache.kernel_variant(kernel.key))
        variants = [variant for kernel in unknown for variant in variants_of(kernel)]
        coming = compile_ahead(variants, compiled.target.sm, nvrtc_libraries(), cache.cubin)
        load_ahead(variants, coming)

    thread = threading.Thread(target=_quietly, args=(work,), name="fusec-ahead", daemon=True)
    thread.start()
    yield
    thread.join()  # so that no kernel is begun twice


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:  # noqa: BLE001  # the compilation itself raises and reports what fails again
        _log.debug("work ahead of cuDNN's answers failed", exc_info=True)


@contextmanager
def compiled_ahead(proposed: ProposedKernels, oracle: Oracle | None) -> Generator[None]:
    """Compile proposed kernels if workers are asked about this machine's GPU during the body.

    Nothing is compiled where all answers are stored, because then the kernels are on disk, too.
    """
    if oracle is None or not oracle.device:
        yield
        return
    begun: list[threading.Thread] = []
    oracle.meanwhile = lambda: begun.append(proposed.start())
    try:
        yield
    finally:
        oracle.meanwhile = None
        for thread in begun:
            thread.join()  # so that no kernel is begun twice
