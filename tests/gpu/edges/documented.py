"""The differences between a run of an edge value and its meaning that are known and stay: what, where and why.

docs/hazards.md shows them. A run on a GPU fails for any other difference, and for an entry that nothing needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpu.edges.device import Result
from gpu.edges.judged import Disagreement

FORMS = {"simulated": "cudnn", "emulated": "kernel"}  # what a form on the CPU stands in for
WORDS = {"cudnn": "cuDNN", "kernel": "kernels", "cupy": "CuPy", "emulated": "the emulator", "": "all"}


@dataclass(frozen=True)
class Documented:
    """`rows` and `values` are patterns of titles and labels; `kinds` are of the judge. forms: empty for all."""

    what: str
    why: str
    kinds: tuple[str, ...]
    forms: tuple[str, ...] = ()
    rows: str = ""
    values: str = ""

    def covers(self, row: str, form: str, one: Disagreement) -> bool:
        """Tell if this entry is about a difference."""
        name = form.split()[0]
        return (
            one.kind in self.kinds
            and (not self.forms or name in self.forms or FORMS.get(name) in self.forms)
            and re.search(self.rows, row) is not None
            and re.search(self.values, one.label) is not None
        )

    @property
    def line(self) -> str:
        """As docs/hazards.md has it."""
        return f"| {', '.join(WORDS[f] for f in self.forms) or 'all'} | {self.what} | {self.why} |"


NUMBERS = ("value", "nan for a number", "nan for infinity", "infinity for a number", "infinity lost")
DOCUMENTED = (
    Documented(
        "denormal operands and results of fp32 and bf16 are zeros",
        "CuPy and fusec compile kernels that flush denormals, and cuDNN's exponentials and quotients flush them",
        ("denormals",),
    ),
    Documented(
        "exp, log, tanh and ops composed of them: a relative error of 1e-3, or an absolute one of 1e-6",
        "cuDNN uses the GPU's approximate instructions, and computes exp(x) - 1 near zero",
        ("digits",),
        ("cudnn",),
    ),
    Documented(
        "max, min, and clip by one bound or by nonzero bounds: the other operand instead of NaN",
        "cuDNN uses the maximum of CUDA, which ignores NaN",
        ("nan lost",),
        ("cudnn",),
        r"\b(max|min|clip) ",
        "nan",
    ),
    Documented(
        "div, softsign: 0 for a divisor beyond 2**126, and NaN if the dividend is infinite too",
        "cuDNN divides as __fdividef does",
        ("value", "nan for infinity"),
        ("cudnn",),
        r"^(div|softsign) ",
        "max",
    ),
    Documented(
        "relu_backward: the gradient, not 0, where the operand is NaN",
        "cuDNN compares by x <= 0",
        ("value", "digits", "nan for a number", "infinity for a number"),
        ("cudnn",),
        r"\brelu_backward ",
        ", nan$",
    ),
    Documented(
        "gelu_backward, gelu_tanh_backward, swish_backward at infinities and near the largest number of fp32: NaN or 0",
        "cuDNN multiplies powers of x, which overflow, by exponentials that underflow to 0",
        ("value", "nan for a number", "nan for infinity"),
        ("cudnn",),
        r"\b(gelu|gelu_tanh|swish)_backward ",
        ", -?(inf|max)$",
    ),
    Documented(
        "attention with every key masked by -infinity: 0 instead of NaN",
        "cuDNN writes zeros for such a query",
        ("nan lost", "value"),
        ("cudnn",),
        r"^attention(_train)? masked",
        "bias all -inf",
    ),
    Documented(
        "guarded attention: NaN, not 0, where a score is NaN or +infinity",
        "cuDNN writes zeros only for a query without keys",
        ("nan for a number",),
        ("cudnn",),
        r"^attention masked.*guarded",
        "bias .*(nan|inf)",
    ),
    Documented(
        "attention with a bias at the largest number of bf16, of either sign: results as for an infinite bias",
        "scores are multiplied by log2(e), which overflows fp32",
        NUMBERS,
        ("cudnn",),
        r"^attention(_train)? masked.*bf16",
        "bias .*max",
    ),
    Documented(
        "attention_train with a bias of +infinity, or an infinity in a key: NaN as the logarithm of the sum",
        "cuDNN subtracts infinity from infinity",
        ("nan for infinity",),
        ("cudnn",),
        r"^attention_train (masked|k )",
        "(bias|k) .*inf",
    ),
    Documented(
        "batch_norm_train of values with an infinity: NaN, not the infinity, as the mean",
        "cuDNN subtracts infinity from infinity",
        ("nan for infinity",),
        ("cudnn",),
        r"^batch_norm_train ",
        "inf",
    ),
    Documented(
        "causal attention: NaN or an infinity in a key does not reach the queries before it",
        "hidden keys are skipped, instead of adding -infinity to their scores",
        ("nan lost",),
        ("cudnn", "kernel"),
        r"^attention causal k ",
        "k (nan|-?inf)",
    ),
    Documented(
        "attention_backward with an infinity, the largest or least number in dy or v: other infinities, fewer digits",
        "gradients of scores are rounded to 16 bits, and the sum subtracted from each is added in another order",
        ("value", "digits", "nan lost"),
        ("cudnn", "kernel"),
        r"^attention_backward (dy|v) ",
        "inf|max|least",
    ),
    Documented(
        "convolution of fp16 with windows larger than 1x1: 0 instead of -infinity",
        "measured with the first engine of cuDNN's heuristics; the cause is unknown",
        ("infinity lost",),
        ("cudnn",),
        r"^conv (3x3|few channels|few filters|edge filters) f16",
        "inf|max",
    ),
    Documented(
        "convolution in groups of a few channels: NaN where another group has NaN or an infinity",
        "cuDNN also multiplies the channels of neighbouring groups, by zeros",
        ("nan for a number",),
        ("cudnn",),
        r"^groups of ",
        "nan|inf",
    ),
    Documented(
        "norms, their gradients, squeeze-and-excitation near the largest number of fp32: NaN, infinity or the bias",
        "sums and squares are computed in fp32, and overflow",
        NUMBERS,
        ("cudnn", "kernel"),
        r"^(layer_norm_backward|instance_norm|batch_norm_train|group_norm|gate )",
        "max",
    ),
    Documented(
        "channel_sums of infinities of both signs: NaN instead of infinity as the sum of squares",
        "deviations from one element are squared",
        ("nan for infinity",),
        ("kernel",),
        r"^channel_sums ",
        "inf and -inf",
    ),
    Documented(
        "log and pow of denormals",
        "the C library's, which does not expect that denormals are zeros",
        ("value",),
        ("emulated",),
        r"^(log|pow) ",
        "denormal",
    ),
)
ON_DEVICE = tuple(d for d in DOCUMENTED if d.forms != ("emulated",))


def undocumented(results: Iterable[Result]) -> Iterator[tuple[Result, Disagreement]]:
    """The differences that no entry covers."""
    for result in results:
        for one in result.found:
            if not any(d.covers(result.row, result.form, one) for d in DOCUMENTED):
                yield result, one


def stale(results: Iterable[Result]) -> list[Documented]:
    """The entries that none of these results, of all rows on a GPU, needs."""
    all_found = [(r.row, r.form, one) for r in results for one in r.found]
    return [d for d in ON_DEVICE if not any(d.covers(*each) for each in all_found)]


def section() -> str:
    """Return the section of docs/hazards.md about them."""
    return "\n".join(
        [
            "## Edge values",
            "",
            "For NaN, infinities, zeros, denormals and the largest numbers, results are those that the op defines.",
            "This holds for cuDNN graphs, fusec's kernels and CuPy, with the exceptions below, found on an H200. The",
            "table is in `tests/gpu/edges/documented.py`. Each op is tested by `pytest -m gpu` with",
            "`tests/gpu/edges/test_edge_values.py`. Sums are added in different orders. If a part of a sum overflows,",
            "the result may be an infinity or NaN in one of them, and a number in another.",
            "In 16 bits, the kernel of `deform_conv` rounds what a window reads, times the mask, before it multiplies",
            "it by the filters. Beyond the largest number of the type that is an infinity, and the result may be NaN.",
            "",
            "| who | what | why |",
            "|---|---|---|",
            *(d.line for d in ON_DEVICE),
            "",
        ]
    )
