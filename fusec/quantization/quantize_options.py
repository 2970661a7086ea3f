"""Define the options of a quantisation, and check them once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from fusec.errors import FusecError
from fusec.quantization.number_formats import FP8, INT4, INT8, NumberFormat
from fusec.quantization.thresholds import CALIBRATIONS
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from fusec.execution.compile_options import Progress
    from fusec.quantization.measure import Score

# The formats of activations (None: they stay in float) and of weights, and the usual calibration. An outlier costs
# integers half of their steps, so int8 takes entropy; fp8 has exponents, so it takes the largest magnitude.
FORMATS: Mapping[str, tuple[NumberFormat | None, NumberFormat, str]] = {
    "int8": (INT8, INT8, "entropy"),
    "fp8": (FP8, FP8, "max"),
    "weights-int8": (None, INT8, ""),
    "weights-int4": (None, INT4, ""),
}


@dataclass(frozen=True)
class QuantizeOptions:
    """The keywords of `fusec.quantize`, which describes them."""

    format: str = "int8"
    calibration: str = ""
    percentile: float = 99.99
    block_size: int = 32
    attention: bool = False
    exclude: Collection[str] = ()
    keep_float: int = 0
    min_sqnr: float | None = None
    score: Score | None = None
    max_loss: float | None = None
    report: bool = False
    target: str = "cpu"
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise FusecError(f"format is one of {', '.join(FORMATS)}, not {self.format!r}")
        if self.calibration and self.calibration not in CALIBRATIONS:
            raise FusecError(f"calibration is one of {', '.join(CALIBRATIONS)}, not {self.calibration!r}")
        if self.calibration and not self.activations:
            raise FusecError(f"{self.format} leaves activations in float, so calibration={self.calibration!r} is void")
        if self.attention and not self.activations:
            raise FusecError(f"{self.format} quantises weights only, and the products of attention have none")
        if not 0 < self.percentile <= 100:
            raise FusecError(f"percentile is {self.percentile}, but must be above 0 and at most 100")
        if self.block_size < 1:
            raise FusecError(f"block_size is {self.block_size}, but must be 1 or more")
        if self.keep_float < 0:
            raise FusecError(f"keep_float is {self.keep_float}, but must be 0 or more")
        if (self.score is None) != (self.max_loss is None):
            raise FusecError("score and max_loss belong together: give both or none")

    @property
    def activations(self) -> NumberFormat | None:
        """Return the format of activations; None if they stay in float."""
        return FORMATS[self.format][0]

    @property
    def weights(self) -> NumberFormat:
        """Return the format of weights."""
        return FORMATS[self.format][1]

    @property
    def method(self) -> str:
        """Return the name of the calibration; empty for none."""
        return self.calibration or FORMATS[self.format][2]

    @property
    def block(self) -> int:
        """Return the elements of a weight that share a scale; 0 for a scale per channel."""
        return self.block_size if self.weights is INT4 else 0

    @property
    def ranks_layers(self) -> bool:
        """Tell if each layer's loss must be measured alone."""
        return self.report or self.keep_float > 0 or self.min_sqnr is not None or self.score is not None

    def report_progress(self, stage: str, done: int, total: int = 0) -> None:
        """Report progress. `total`: 0 if it is not known."""
        if self.progress is not None:
            self.progress(stage, done, total)
