"""Render pages: one HTML file with its own style and script, which needs no network and can be read without script.

Texts from a model are escaped twice over: Jinja2 escapes markup, and every text passes `printable` first, because a
control or bidi character can change what a reader sees. A content security policy forbids all else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from fusec import __version__
from fusec.diagnostics.text_table import bytes_text, listed
from fusec.errors import FusecError
from fusec.system.printable import printable, printable_lines

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = "templates"
RUNNERS = {
    "precompiled": "cuDNN, precompiled",
    "runtime": "cuDNN, compiled at run time",
    "cublaslt": "cuBLASLt",
    "proposed": "proposed to cuDNN",
    "kernel": "kernel of fusec",
    "view": "view, no work",
}
ROUNDED = {
    "fp32": "kept in fp32, not rounded",
    "same": "kept in fp32, with the result that rounding would give",
    "rounded": "rounded before a product",
}


def need_jinja() -> None:
    """Check for Jinja2, before the work whose result it would render. Raises FusecError if it is not installed."""
    if importlib.util.find_spec("jinja2") is None:
        raise FusecError("a report needs Jinja2: pip install 'fusec[report]'")


def page(template: str, **facts: Any) -> str:
    """Render a template of this package. facts: what it reads.

    Raises FusecError if Jinja2 is not installed.
    """
    need_jinja()
    script = _text("page.js")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    )
    from markupsafe import Markup  # here, because only the extra `report` installs it

    own = {"style": Markup(_text("style.css")), "script": Markup(script), "policy": policy, "fusec": __version__}
    return _environment().get_template(template).render(**own, **facts)


def _text(name: str) -> str:
    return (resources.files("fusec.report") / TEMPLATES / name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> Environment:
    """Make the Jinja2 environment: all texts are escaped, and missing names are errors."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup, escape

    def shown(value: Any) -> Any:
        """Escape control characters of each text; markup of the templates has none."""
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    def lines(text: str) -> Markup:
        """Escape a text whose line breaks come from fusec."""
        return Markup(escape(printable_lines(text)))

    environment = Environment(
        loader=FunctionLoader(_text),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., object]] = {
        "bytes": bytes_text,
        "us": time_text,
        "rate": rate_text,
        "lines": lines,
        "names": _names,
        "firsts": _firsts,
    }
    for name, function in filters.items():
        environment.filters[name] = function
    names: dict[str, Any] = {"RUNNERS": RUNNERS, "ROUNDED": ROUNDED}
    environment.globals.update(names)
    return environment


def _names(names: Iterable[str], width: int = 60) -> str:
    """Return as many names as fit, and how many more there are."""
    return listed(tuple(names), width)


def _firsts(places: Iterable[Sequence[str]]) -> list[str]:
    """Return the first model node of each place, each once."""
    return list(dict.fromkeys(name for place in places for name in place[:1]))


def time_text(us: float | None) -> str:
    """Return microseconds in µs, ms or s, with three digits; empty for None."""
    if us is None:
        return ""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} µs"


def rate_text(rate: float) -> str:
    """Return a rate per second with a prefix: 4.8 T, 67 G."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g} "
