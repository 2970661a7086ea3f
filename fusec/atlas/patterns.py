"""List the fusion patterns of the atlas: a small table of words and precisions, and attention written out."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache

from fusec.atlas.pattern_text import text_of
from fusec.system.dataclass import dataclass

DTYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "tf32": "f32", "int8": "i8"}


@dataclass(frozen=True)
class Pattern:
    """A pattern: its name, its family, the precision it is computed in, and its graph in text form."""

    name: str
    family: str
    precision: str  # fp16, bf16, fp32 (without tensor cores), tf32 or int8
    text: str

    @property
    def tensor_cores(self) -> bool:
        return self.precision != "fp32"


# Family, precisions, and the patterns of words. `nchw` in front: images in row-major memory.
_ALL, _MAIN = "fp16 bf16 tf32 fp32", "fp16 tf32 fp32"
_TABLE: tuple[tuple[str, str, str], ...] = (
    ("convolution", _ALL, "conv | conv bias | conv bias relu | conv bias add relu | conv bias swish"),
    ("convolution", _MAIN, "conv add relu | conv bias gelu | conv scale bias relu"),
    (
        "convolution",
        "fp16",
        """conv relu | conv bias relu6 | conv bias sigmoid | conv bias tanh | conv bias elu | conv bias leaky_relu
        | conv bias gelu_tanh | conv bias hard_swish | conv bias mish | conv bias softplus | conv bias relu add
        | conv bias swish add | conv bias relu times | conv bias gate | conv bias mul | conv bias max
        | conv bias to_fp32 | conv bias relu to_int8 | conv channel_sum | conv to_fp32 channel_sum | conv bias sign""",
    ),
    ("convolution", "fp16", "relu conv | scale bias relu conv | scale bias relu conv to_fp32 channel_sum | gate conv"),
    ("convolution, row-major", "fp16 fp32", "nchw conv | nchw conv bias relu | nchw conv bias add relu"),
    ("convolution, kinds", "fp16 fp32", "conv1x1 bias relu | depthwise bias relu6 | conv_groups4 bias relu"),
    (
        "convolution, kinds",
        "fp16",
        """conv1x1 bias swish | conv1x1 bias add relu | conv_stride2 bias relu | conv_dilated bias relu | depthwise
        | depthwise bias swish | conv_3channels bias relu | conv_30channels bias relu | conv1d bias relu
        | conv1d bias gelu | conv3d bias relu | conv_transpose | conv_transpose bias relu""",
    ),
    ("convolution, backward", "fp16 bf16 fp32", "conv_wgrad"),
    ("convolution, backward", "fp16", "scale bias relu conv_wgrad | conv_transpose relu"),
    ("product", _ALL, "matmul | matmul bias relu"),
    ("product", "fp16 bf16 tf32", "matmul bias | matmul bias gelu | matmul bias add"),
    (
        "product",
        "fp16",
        """matmul bias sigmoid | matmul bias tanh | matmul bias gelu_tanh | matmul bias swish | matmul bias swish mul
        | matmul bias softmax | matmul bias to_fp32 | matmul times | matmul scale | matmul add | matmul mul
        | matmul row_sum | matmul to_fp32 row_max | matmul to_fp32 channel_sum | matmul bias add relu
        | matmul bias erf""",
    ),
    ("product", "fp16", "relu matmul | times matmul | bias gelu matmul | mul matmul bias"),
    (
        "product, kinds",
        "fp16",
        """matmul_transposed | matmul_transposed bias gelu | matmul_batched | matmul_batched times add
        | matmul_batched softmax | matmul_shared bias gelu | matmul_shared bias add | matmul_odd
        | matmul_odd bias relu | matmul_1row | matmul_1row bias relu""",
    ),
    ("product, kinds", "tf32", "matmul_transposed bias gelu | matmul_batched | matmul_shared bias gelu | matmul_odd"),
    (
        "8-bit integers",
        "int8",
        """conv | conv to_fp32 times | conv to_fp32 scale bias relu | conv to_fp32 scale bias relu to_int8
        | conv to_fp32 scale to_fp16 | conv1x1 to_fp32 scale bias relu | matmul | matmul to_fp32 scale bias
        | matmul to_fp32 scale bias gelu | to_fp16 matmul | to_fp16 times matmul | to_fp16 conv""",
    ),
    ("norm", "fp16 bf16 fp32", "layer_norm | rms_norm | instance_norm"),
    ("norm", "fp16", "layer_norm gelu | layer_norm add | add layer_norm | rms_norm times | instance_norm relu"),
    ("reduction", "fp32", "sum_rows | mean_rows | max_rows | sum_columns | mean_image | sum_image | exp sum_rows"),
    ("reduction", "fp16", "sum_rows | mean_image | to_fp32 sum_rows | to_fp32 sum_columns | to_fp32 exp sum_rows"),
    ("reduction", "fp16", "to_fp32 abs max_rows | to_fp32 mul sum_rows | to_fp32 max_image | relu to_fp32 sum_image"),
    ("reduction, row-major", "fp16 fp32", "nchw mean_image | nchw to_fp32 sum_image"),
    ("pointwise", "fp16 fp32", "image relu | image add relu | image scale bias relu | image swish | image gelu"),
    (
        "pointwise",
        "fp16",
        """image add | image mul sigmoid | image gelu_tanh | image mish | image hard_swish | image relu6 | image exp
        | image log | image erf | image sqrt | image tanh | image sin | image ceil | image sign | image reciprocal
        | image gate add | rows add relu | rows bias gelu | rows swish mul | rows softmax | rows to_fp32""",
    ),
    ("pointwise, row-major", "fp16", "nchw image add relu | nchw image gate"),
)

# Attention: name, precision, shapes of q and k, mask, attributes. Heads share keys where k has fewer.
_ATTENTION: tuple[tuple[str, str, str, str, str, str], ...] = (
    ("attention", "fp16", "2,8,128,64", "2,8,128,64", "", ""),
    ("attention", "bf16", "2,8,128,64", "2,8,128,64", "", ""),
    ("attention", "fp32", "2,8,128,64", "2,8,128,64", "", ""),
    ("attention causal", "fp16", "2,8,128,64", "2,8,128,64", "", ", causal=true"),
    ("attention causal", "bf16", "2,8,128,64", "2,8,128,64", "", ", causal=true"),
    ("attention, a mask for all heads", "fp16", "2,8,128,64", "2,8,128,64", "2,1,128,128", ""),
    ("attention, a mask for each head", "fp16", "2,8,128,64", "2,8,128,64", "1,8,128,128", ""),
    ("attention, a mask of the keys", "fp16", "2,8,128,64", "2,8,128,64", "2,1,1,128", ""),
    ("attention, 32 per head", "fp16", "2,8,128,32", "2,8,128,32", "", ""),
    ("attention, 128 per head", "fp16", "2,8,128,128", "2,8,128,128", "", ""),
    ("attention, 256 per head", "fp16", "2,8,128,256", "2,8,128,256", "", ""),
    ("attention, 80 per head", "fp16", "2,8,128,80", "2,8,128,80", "", ""),
    ("attention, 4 heads share keys", "fp16", "2,8,128,64", "2,2,128,64", "", ", causal=true"),
    ("attention, one query", "fp16", "2,8,1,64", "2,8,512,64", "", ""),
    ("attention, 197 tokens", "fp16", "2,12,197,64", "2,12,197,64", "", ""),
    ("attention, 4096 tokens", "fp16", "1,8,4096,128", "1,8,4096,128", "", ", causal=true"),
)


def _words() -> Iterator[Pattern]:
    for family, precisions, row in _TABLE:
        for words in (" ".join(part.split()) for part in row.split("|")):
            plain = words.removeprefix("nchw ")
            for precision in precisions.split():
                text = text_of(plain, DTYPES[precision], channels_last=plain == words)
                yield Pattern(plain.replace(" ", "+"), family, precision, text)


def _attention() -> Iterator[Pattern]:
    for name, precision, query, key, mask, attributes in _ATTENTION:
        dtype = DTYPES[precision]
        rest = f", %m: {dtype}[{mask}]" if mask else ""
        operands = f"%q: {dtype}[{query}], %k: {dtype}[{key}], %v: {dtype}[{key}]{rest}"
        called = f"attention(%q, %k, %v{', %m' if mask else ''}) {{scale=0.125{attributes}}}"
        text = f'graph "pattern" ({operands}) {{\n  %y = {called} : {dtype}[{query}]\n  return %y\n}}\n'
        yield Pattern(name, "attention", precision, text)
    for precision in ("fp16", "bf16"):
        yield from _training(precision, DTYPES[precision])


def _training(precision: str, dtype: str) -> Iterator[Pattern]:
    """Yield attention with the sums that its gradient needs, and the gradient."""
    t, sums = f"{dtype}[2,8,128,64]", "f32[2,8,128,1]"
    qkv = ", ".join(f"%{name}: {t}" for name in "qkv")
    for causal in ("", ", causal=true"):
        name = f"attention{' causal' if causal else ''}"
        attributes = f"{{scale=0.125{causal}}}"
        forward = f"  %y, %s = attention_train(%q, %k, %v) {attributes} : {t}, {sums}\n  return %y, %s"
        yield Pattern(f"{name}, for training", "attention", precision, f'graph "pattern" ({qkv}) {{\n{forward}\n}}\n')
        operands = f"%dy: {t}, {qkv}, %y: {t}, %s: {sums}"
        called = f"attention_backward(%dy, %q, %k, %v, %y, %s) {attributes} : {t}, {t}, {t}"
        backward = f"  %dq, %dk, %dv = {called}\n  return %dq, %dk, %dv"
        yield Pattern(f"{name}, gradient", "attention", precision, f'graph "pattern" ({operands}) {{\n{backward}\n}}\n')


@cache
def patterns(only: str = "*") -> tuple[Pattern, ...]:
    """Return the patterns whose names match a glob; a name, a family and a precision together occur once."""
    return tuple(pattern for pattern in (*_words(), *_attention()) if fnmatchcase(pattern.name, only))
