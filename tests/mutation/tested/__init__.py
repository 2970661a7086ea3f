"""Faults that tests are to find, each one exact replacement in one file of the package.

They lie where random graphs do not come: in what only large or 16-bit models meet, in training, in files and on a GPU.
`tests` (files or folders below tests/) are those that somebody who edits the file would run.
"""

from __future__ import annotations

from mutation.mutants import Mutant
from mutation.tested.compile_time import COMPILE_TIME
from mutation.tested.detectors import DETECTORS
from mutation.tested.loops import LOOPS
from mutation.tested.program_cache import PROGRAM_CACHE
from mutation.tested.programs import PROGRAMS
from mutation.tested.quantised import QUANTISED
from mutation.tested.quantization import QUANTIZATION
from mutation.tested.running import RUNNING
from mutation.tested.training import TRAINING

TESTED: tuple[Mutant, ...] = (
    *TRAINING,
    *PROGRAMS,
    *RUNNING,
    *QUANTIZATION,
    *QUANTISED,
    *DETECTORS,
    *COMPILE_TIME,
    *PROGRAM_CACHE,
    *LOOPS,
)
