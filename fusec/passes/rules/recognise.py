"""Recognise activations, norms and softmax that are spelled as smaller ops."""

from __future__ import annotations

from fusec.passes.base import RulePass
from fusec.passes.rules import activation, casts, moments, norm, rotary


class Recognise(RulePass):
    """Recognise activations, norms and softmax that are spelled as smaller ops."""

    name = "recognise"
    rules = (*moments.RULES, *norm.RULES, *activation.RULES, *rotary.RULES, *casts.RULES)
