"""Configure Sphinx, which builds the documentation site: `make docs`.

Sphinx with MyST reads the pages of `docs/` as they are, so the site and the repository show the same files. Warnings
are errors: a link, an anchor or a reference that leads nowhere fails the build. Sphinx and not MkDocs, because it also
checks references into the Python API, reads docstrings itself, and has several releases a year.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import fusec

project = "fusec"
version = release = fusec.__version__
copyright = "the fusec authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["docs/**", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"]
exclude_patterns = [".[a-z]*", "build", "dist", "examples", "fusec", "tests"]
source_suffix = {".md": "markdown"}
nitpicky = True
# Types in signatures that the site does not describe: those of other packages, and of fusec's inside.
nitpick_ignore_regex = [
    ("py:.*", r"(?!fusec\.)[\w.\[\], |]+"),
    ("py:class", r"fusec\.(artifacts|dynamic_shapes|execution|lowering|passes|plans)\..*"),
    ("py:class", r"fusec\.(scale|schedule|segments|serving|system)\..*"),
]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = ["myst.header"]

html_theme = "furo"
html_title = f"fusec {release}"
html_show_sourcelink = False
html_additional_pages = {"index": "to_docs.html"}
templates_path = ["templates"]
pygments_style = "default"

python_maximum_signature_line_length = 88
autodoc_typehints = "signature"
autodoc_mock_imports = ["torch", "functorch"]  # of one package: a download of its own size, and an extra
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
default_role = "code"


def setup(app: Any) -> None:
    """Connect the hooks below."""
    app.connect("source-read", list_every_page)
    app.connect("source-read", links_to_files)
    app.connect("autodoc-process-docstring", parameters_as_list)


def list_every_page(app: Any, name: str, text: list[str]) -> None:
    """Add the pages that the index does not list to its menu, so that none is lost."""
    if name != root_doc:
        return
    folder = Path(app.srcdir) / "docs"
    pages = [str(path.relative_to(folder).with_suffix("")) for path in sorted(folder.rglob("*.md"))]
    listed = re.findall(r"^([\w./-]+)$", text[0], re.MULTILINE)
    if new := [page for page in pages if page not in (*listed, "index")]:
        text[0] += "\n```{toctree}\n:caption: More\n:hidden:\n\n" + "\n".join(new) + "\n```\n"


def links_to_files(app: Any, name: str, text: list[str]) -> None:
    """Let links to a folder of the repository lead to its first file, since a site has no folders to show.

    Diagrams stay text: what draws them would be fetched from a server.
    """
    here = (Path(app.srcdir) / name).parent

    def file(found: re.Match[str]) -> str:
        goal = here / found[1]
        if not goal.is_dir():
            return found[0]
        first = next((path for path in (goal / "__init__.py", *sorted(goal.glob("*.*"))) if path.is_file()), None)
        return found[0] if first is None else f"]({found[1].rstrip('/')}/{first.name})"

    text[0] = re.sub(r"\]\(([^)#:\s]+)\)", file, text[0]).replace("```mermaid", "```text")


def parameters_as_list(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Turn lines such as `target: name of the GPU` into a list of parameters, which reST would join to a paragraph."""
    fence = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")
    made: list[str] = []
    for line in lines:
        found = fence.match(line)
        if found and not line.startswith((".. ", "http")):
            if made and made[-1] and not made[-1].startswith(("* ", "  ")):
                made.append("")
            made.append(f"* **{found[1]}**: {line[found.end() :]}")
        elif made and made[-1].startswith(("* ", "  ")) and line.strip():
            made.append(f"  {line.strip()}")
        else:
            made.append(line)
    lines[:] = made
