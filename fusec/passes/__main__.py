"""Print the pipeline and every rule as Markdown: `python -m fusec.passes` (docs/passes.md holds it)."""

from __future__ import annotations

import re
import sys

from fusec.passes import PIPELINE, rules_by_pass


def markdown() -> str:
    """Return numbered passes, then the rules of each as equations."""
    lines = ["| | pass | what it does |", "|---|---|---|"]
    lines += [f"| {i} | `{step.name}` | {_summary(step)} |" for i, step in enumerate(PIPELINE, 1)]
    for name, known in rules_by_pass().items():
        if known:
            lines += ["", f"### `{name}`", ""]
            lines += [f"- `{rule.name}`: `{rule.equation}`" for rule in known]
    return "\n".join(lines)


def _summary(step: object) -> str:
    """Return the first sentence of the pass's module."""
    text = " ".join((sys.modules[type(step).__module__].__doc__ or "").split())
    return re.split(r"[.;] ", text)[0].rstrip(".")


if __name__ == "__main__":
    print(markdown())
