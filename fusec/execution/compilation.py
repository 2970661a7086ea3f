"""Define the result of a compilation as data: the graphs, the program, and the cuDNN graph of each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from fusec.errors import TargetError
from fusec.gpu.autotune.candidates.candidate_times import StepTuning, candidate_graphs, candidate_kernels
from fusec.gpu.autotune.step_choices import TunedChoices, before_choices
from fusec.gpu.cudnn.legality.judges import asks_cudnn
from fusec.gpu.cudnn.without_driver.deviceless import INSTALL
from fusec.gpu.kernels import GpuFigures, Kernel
from fusec.ir import Graph, MissingLiteral
from fusec.lower_cudnn import Lowered, lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.base import Options
from fusec.passes.partition.judge import Judge
from fusec.plans.lock_record import Lock
from fusec.schedule.program import Kind, Program
from fusec.system.dataclass import dataclass
from fusec.targets.target import CPU, Target

NOT_ASKED = (
    "cuDNN was not asked, since nothing of it is installed: fusec's rules alone say what fuses. "
    f"To ask it: {INSTALL}. To run op by op: --target cpu"
)


def label(asked: bool, target: str) -> str:
    """Return the note that cuDNN was not asked, with the remedy; empty if it was asked, or the target is no GPU."""
    return "" if asked or target == CPU else NOT_ASKED


@dataclass(frozen=True, eq=False)
class Compiled:
    """A model compiled for one target, before it is prepared to run.

    imported: the model as imported, or a function that reads it at first use and then returns the same graph.
    judge: decided what fuses, and answers for reports; None for a loaded file without cuDNN.
    tuned: the tuned or locked choices of the program's steps; None if nothing was tuned or locked.
    """

    imported: Graph | Callable[[], Graph]
    program: Program
    target: Target
    options: Options
    judge: Judge | None
    tuned: TunedChoices | Lock | None = None

    @cached_property
    def source(self) -> Graph:
        """Return the model as imported; `program.graph` is the model after the passes.

        Raises ModelError if the model is in a file and has another form than fusec writes.
        """
        return self.imported if isinstance(self.imported, Graph) else self.imported()

    @property
    def asked(self) -> bool:
        """Tell if cuDNN was asked; else fusec's rules alone decided what fuses."""
        return asks_cudnn(self.judge)

    @property
    def has_sources(self) -> bool:
        """Tell if the weights of the imported model are here; a `.fusec` file may be written without them."""
        return not any(isinstance(value.literal, MissingLiteral) for value in self.source.values())

    @property
    def note(self) -> str:
        """Return the note that reports print; empty if cuDNN was asked, or the target is no GPU."""
        return label(self.asked, self.target.name)

    def require_answers(self, what: str) -> None:
        """Raise TargetError if cuDNN was not asked about the steps of the program that it shall run.

        what: what needs the answers, for the message.
        """
        if not self.asked and any(step.kind is Kind.CUDNN for step in self.program.steps):
            raise TargetError(f"{what} needs cuDNN's answers, and cuDNN was not asked: install it, {INSTALL}")

    @property
    def graph(self) -> Graph:
        """Return the model after the passes, which the program's steps cover."""
        return self.program.graph

    @cached_property
    def figures(self) -> GpuFigures:
        """Return the figures of the target, which shape its kernels."""
        return GpuFigures.of(self.target)

    @cached_property
    def lowered(self) -> tuple[Lowered | None, ...]:
        """Return the cuDNN graph of each step; None for kernels and views."""
        return tuple(
            lower(step.body, self.options.tensor_cores) if step.kind is Kind.CUDNN else None
            for step in self.program.steps
        )

    @cached_property
    def candidate_graphs(self) -> dict[str, CudnnGraph]:
        """Return the cuDNN graphs that a GPU may time to choose what runs each step, by key."""
        return candidate_graphs(self._before_choices, self._tuning)

    @cached_property
    def candidate_kernels(self) -> dict[str, Kernel]:
        """Return the kernels that a GPU may time to choose what runs each step, and those of other steps, by key."""
        return candidate_kernels(self._before_choices, self._tuning)

    @property
    def _before_choices(self) -> Program:
        return before_choices(self.program, self.figures, self.options.as_source)

    @property
    def _tuning(self) -> StepTuning:
        level = "none" if self.options.as_source else "quick"
        return StepTuning(self.options.tensor_cores, self.target.launch_us, level, self.figures)
