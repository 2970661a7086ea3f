"""Draw the next token of each sequence by the softmax of its best logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import HostArray


def sampler(temperature: Any, seed: Any) -> Callable[[HostArray, HostArray], HostArray]:
    """Return a function that draws a token for each sequence from its best tokens, by softmax of their logits.

    Raises ExecutionError for a temperature or seed out of range.
    """
    if not isinstance(temperature, int | float | np.number) or not temperature > 0:  # NaN is not larger either
        raise ExecutionError(f"temperature is {temperature!r}, but must be positive; top_k=0 takes the best token")
    try:
        rng = np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise ExecutionError(f"seed is a whole number of at least 0, or None, not {seed!r}") from error

    def draw(logits: HostArray, tokens: HostArray) -> HostArray:
        # The place of the largest sum of a logit and Gumbel noise is distributed by the softmax. The best logit is
        # subtracted first, so that a tiny temperature does not make all of them infinite.
        wide = logits.astype(np.float64)
        with np.errstate(over="ignore"):
            noisy = (wide - wide.max(1, keepdims=True)) / temperature + rng.gumbel(size=logits.shape)
        return np.take_along_axis(tokens, noisy.argmax(1)[:, None], 1)[:, 0]

    return draw
