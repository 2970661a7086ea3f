"""Faults in how quantised models run in integers."""

from __future__ import annotations

from mutation.mutants import Mutant
from mutation.mutants import for_tests as _m

QUANTISED: tuple[Mutant, ...] = (
    _m(
        "pads_without_zero_point",
        "quantised",
        "passes/quantization/integer_products.py",
        "    if zero and any(op.pads):\n",
        "    if zero < 0 and any(op.pads):\n",
        "pads are the integer 0 though the zero point is another",
        "passes/test_cases.py",
    ),
    _m(
        "zero_point_term_added",
        "quantised",
        "passes/quantization/integer_products.py",
        "return (-zero * weight.astype(np.int64).sum(axis=rest)).reshape(shape)",
        "return (zero * weight.astype(np.int64).sum(axis=rest)).reshape(shape)",
        "the term of the zero point is added instead of subtracted",
        "passes/test_cases.py",
    ),
    _m(
        "scales_stay_where_they_were",
        "quantised",
        "passes/quantization/move_scales.py",
        "None if f.axis is None else perm.index(f.axis)",
        "f.axis",
        "a transposed weight is scaled along its old dim",
        "passes/test_cases.py",
    ),
    _m(
        "other_zero_point_kept",
        "quantised",
        "passes/quantization/move_rounding.py",
        "    if not (found.zero.equals(rounded.zero) and found.scale.equals(rounded.scale)):\n",
        "    if not found.scale.equals(rounded.scale):\n",
        "integers are reused that stand for other numbers",
        "passes/test_cases.py",
    ),
    _m(
        "conversion_truncates",
        "quantised",
        "lowering/simulator.py",
        "np.clip(ROUND(result), info.min, info.max)",
        "np.clip(np.trunc(result), info.min, info.max)",
        "the simulator rounds to zero where cuDNN rounds to the nearest",
        "lowering/test_lower_cudnn.py",
    ),
    _m(
        "conversion_wraps",
        "quantised",
        "lowering/simulator.py",
        "np.clip(ROUND(result), info.min, info.max), nan=0.0).astype(dtype.numpy)",
        "ROUND(result), nan=0.0).astype(np.int64).astype(dtype.numpy)",
        "the simulator wraps around where cuDNN saturates",
        "lowering/test_lower_cudnn.py",
    ),
    _m(
        "narrower_limit_lost",
        "quantised",
        "lowering/conversion.py",
        "    if high < HIGH:\n",
        "    if high < low:\n",
        "a limit below that of i8 is left out",
        "lowering/test_lower_cudnn.py",
    ),
    _m(
        "sums_in_halves",
        "quantised",
        "passes/layout/precision.py",
        "        _cast_at_edges(graph, kept, literals, storage)\n",
        "",
        "fp32 values between integers meet constants of 16 bits",
        "passes/test_cases.py",
    ),
)
