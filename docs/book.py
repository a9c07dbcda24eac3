"""Builds the course as a site: `make book`, or `python docs/book.py build/book`.

The pages are made in three steps. `stage` lays the sources out for Sphinx: the notebooks as they are saved, with stubs and
without solutions, a page for each file that they link to, and the API from docstrings. Sphinx and MyST-NB turn them into
HTML with search, light and dark, and run nothing. `broken_links` looks at the result.
"""

from __future__ import annotations

import argparse
import html.parser
import importlib
import inspect
import json
import re
import shutil
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import gpukit

ROOT = Path(__file__).resolve().parents[1]
# The modules whose public names the book documents, by the title of their page.
API = {
    "gpukit": ["gpukit"],
    "gpukit.kernels": ["gpukit.kernels"],
    "gpukit.accounting": [
        f"gpukit.accounting.{name}"
        for name in ("models", "memory", "flops", "training", "decoding", "roofline", "collectives", "tiling", "dtypes")
    ],
    "gpukit.simulator": [
        f"gpukit.simulator.{name}"
        for name in ("trace.tracer", "compiler.compile", "prediction.predict", "simt", "queue_model", "allocator")
    ],
}  # fmt: skip
_DOCUMENTS = ("INSTRUCTOR.md", "CHANGELOG.md")
_LANGUAGES = {".py": "python", ".cu": "cuda", ".csv": "text", ".toml": "toml"}
_CONFIG = """
project = "gpukit"
extensions = ["myst_nb"]
html_theme = "furo"
html_title = "gpukit"
html_static_path = ["_static"]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "attrs_inline"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure", "myst.header"]  # kernels in CUDA C++; cells that begin with ###
html_css_files = ["book.css"]
"""
# Text that is laid out by hand wraps where the page is narrow. The columns of an output's table keep apart, their titles
# wrap, and what is still wider than the page scrolls by itself. On a phone headings are smaller, and a picture keeps a width
# at which its labels can be read. In the dark theme the white cards of the pictures turn dark as they do in JupyterLab
# (gpukit/widgets/custom.css).
_CSS = """
.highlight-text pre, .api pre { white-space: pre-wrap }
.cell_output { overflow-x: auto }
.cell_output > p:first-child, .cell_output > :first-child > p:first-child { margin-top: 0 }
.cell_output > p:last-child, .cell_output > :last-child > p:last-child { margin-bottom: 0 }
.cell_output table { font-size: 0.8em }
.cell_output :is(th, td) { padding: 0.15em 0.4em }
.cell_output th { white-space: normal !important; vertical-align: bottom }
details + .cell { margin-top: 1em }
@media (max-width: 40em) {
  article :is(h1, h2, h3) { font-size: 1.5em; overflow-wrap: anywhere }
  .cell_output img { width: 40em; max-width: none }
}
body[data-theme="dark"] .cell_output img { DARK }
@media (prefers-color-scheme: dark) { body[data-theme="auto"] .cell_output img { DARK } }
"""


def stage(target: Path, root: Path = ROOT) -> None:
    """Sources for Sphinx in the folder `target`, made anew. Nothing of solutions/ gets there."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "notebooks").mkdir(parents=True)
    (target / "_static").mkdir()
    pages: dict[str, str] = {}  # the files that get a page: their path in the course, and the page's
    notebooks = sorted((root / "notebooks").glob("*.ipynb"))
    for path in notebooks:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = _relinked("".join(cell["source"]), "notebooks", pages, root)
                continue
            if cell["metadata"].get("jupyter", {}).get("source_hidden"):
                cell["metadata"].setdefault("tags", []).append("remove-input")
            for output in cell["outputs"]:  # Sphinx follows the links of cells, and copies those of outputs as they are
                if said := output.get("data", {}).get("text/markdown"):
                    linked = _relinked("".join(said), "notebooks", pages, root)
                    linked = re.sub(r"\]\(/([^()#\s]+?)(?:\.md)?((?:#[^()\s]*)?)\)", _page_of_site, linked)
                    output["data"]["text/markdown"] = re.sub(r"(\]\(\d\d_\w+)\.ipynb", r"\1.html", linked)
                if shown := output.get("data", {}).get("text/html"):
                    output["data"]["text/html"] = re.sub(r'(href="\d\d_\w+)\.ipynb', r"\1.html", "".join(shown))
        (target / "notebooks" / path.name).write_text(json.dumps(notebook), encoding="utf-8")
    documents = {name: root / name for name in _DOCUMENTS if (root / name).exists()}
    for name, path in documents.items():
        (target / name).write_text(_relinked(path.read_text(encoding="utf-8"), "", pages, root), encoding="utf-8")
    shutil.copy(root / "docs" / "ladder.svg", target)
    shutil.copy(root / "docs" / "cheatsheet.html", target / "_static")
    for name, modules in API.items():
        (target / f"api-{name}.md").write_text(api_page(name, modules), encoding="utf-8")
    for source, page in pages.items():
        (target / page).parent.mkdir(parents=True, exist_ok=True)
        (target / page).write_text(_source_page(root / source, source), encoding="utf-8")
    dark = re.search(r"filter: [^;}]+", (root / "gpukit" / "widgets" / "custom.css").read_text(encoding="utf-8"))[0]
    (target / "_static" / "book.css").write_text(_CSS.replace("DARK", dark), encoding="utf-8")
    (target / "conf.py").write_text(_CONFIG, encoding="utf-8")
    stubs = [page for source, page in sorted(pages.items()) if source.startswith("exercises/")]
    others = [page for source, page in sorted(pages.items()) if not source.startswith("exercises/")]
    files = f"# Stubs and code\n\n## The exercises' stubs\n\n{_tree(stubs)}\n## Code that the lessons point to\n\n{_tree(others)}"
    (target / "files.md").write_text(files, encoding="utf-8")
    (target / "index.md").write_text(_index(root, [path.stem for path in notebooks], [*documents]), encoding="utf-8")


def _page_of_site(link: re.Match) -> str:
    """A link from a notebook to a source page of the site, as one to what Sphinx makes of that."""
    return f"](../{link[1]}{'' if link[1].endswith('.html') else '.html'}{link[2]})"


def _relinked(text: str, folder: str, pages: dict[str, str], root: Path) -> str:
    """`text` with each link to a file of the course turned into one to the page made of it, which `pages` then lists."""

    def page(link: re.Match) -> str:
        path, _, _place = link[1].partition("#")
        file = (root / folder / path).resolve()
        if (
            "://" in path
            or not path
            or file.suffix == ".ipynb"
            or file.name in _DOCUMENTS
            or not file.is_relative_to(root)
        ):
            return link[0]
        inside = file.relative_to(root).as_posix()
        if file.suffix == ".md":  # for contributors
            return "](/index.md)"
        if inside.startswith(("solutions", "tests")) or not file.is_file():
            return "](/index.md)" if inside.startswith("solutions") else "](/index.md#where-the-numbers-are)"
        if inside == "docs/cheatsheet.html":
            return "](/_static/cheatsheet.html)"
        pages[inside] = f"files/{inside.replace('/', '-')}.md"
        return f"](/{pages[inside]})"

    return re.sub(r"\]\(([^()\s]+)\)", page, text)


def _source_page(path: Path, name: str) -> str:
    text = path.read_text(encoding="utf-8")
    fence = "`" * 4
    return f"# {name}\n\n{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"


def api_page(title: str, modules: list[str]) -> str:
    """One page of the API: what each module is, and the signature and docstring of its public names."""
    lines = [f"# {title}", ""]
    for name in modules:
        module = importlib.import_module(name)
        if name != title:
            lines += [f"## {name}", ""]
        lines += _prose(inspect.getdoc(module) or "")
        for public, value in _public(module):
            lines += [f"### {public}", "", *_block("python", _signature(public, value))]
            lines += _prose(inspect.getdoc(value) or "")
    return "\n".join(lines)


def _public(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Functions and classes that `module` offers: those of __all__, else those it defines."""
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    for name in sorted(set(names)):
        value = getattr(module, name)
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)) and inspect.getdoc(value):
            yield name, value


def _signature(name: str, value: object) -> str:
    """As `def` would show it: in one line, or with a line for each parameter."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    # Annotations are kept as text by the modules' `from __future__ import annotations`; their quotes are no part of them.
    whole = re.sub(r"(: |-> )'([^']*)'", r"\1\2", f"{name}{signature}")
    if len(whole) <= 80:
        return whole
    inside, _, result = whole[len(name) + 1 :].rpartition(")")
    parts = re.split(r", (?=[*/]|\w+\b(?:: |=|,|$))", inside)
    return f"{name}(\n    " + ",\n    ".join(parts) + f",\n){result}"


def _prose(text: str) -> list[str]:
    """A docstring as Markdown: paragraphs, and lists where a line is a name, two spaces or more, and what it means."""
    lines = []
    for paragraph in re.split(r"\n\s*\n", text):
        rows = paragraph.split("\n")
        if not any(re.match(r"\S.*?\s{2,}\S", row) for row in rows):
            lines += [_escaped(" ".join(row.strip() for row in rows)), ""]
            continue
        for row in rows:
            if item := re.match(r"(\S.*?)\s{2,}(\S.*)", row):
                lines.append(f"- `{item[1].replace('`', '')}`: {_escaped(item[2])}")
            else:  # the rest of the item above; or a sentence before or after the list
                lines += [f"  {_escaped(row.strip())}"] if row.startswith(" ") else ["", _escaped(row), ""]
        lines.append("")
    return lines


def _escaped(text: str) -> str:
    """`text` with what Markdown would take for marks escaped, outside of `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>$\[\]#{}|])", r"\\\1", part) for part in parts)


def _block(language: str, text: str) -> list[str]:
    return [f"````{language}", text, "````", ""] if text else []


def _index(root: Path, notebooks: list[str], documents: list[str]) -> str:
    readme = (root / "README.md").read_text(encoding="utf-8")
    head, course = readme.split("## The course\n")
    head = re.sub(r"!\[[^\]]*\]\(https[^)]*\) ?", "", head).replace("docs/ladder.svg", "ladder.svg")
    trees = {
        "The course": [f"notebooks/{name}" for name in notebooks],
        "The API": [f"api-{name}.md" for name in API],
        "More": ["files.md", *documents],
    }
    parts = [
        head,
        "This book shows the notebooks as they are saved, with pictures in place of the widgets. To move the widgets, do the "
        "exercises and have them checked, open the course in JupyterLab as above. The formulas and GPUs of the course are on "
        "[one page to print](/_static/cheatsheet.html).\n",
        "## The course\n" + course.split("\n## ")[0],
        "## Where the numbers are\n\nMeasured rows lie in the folder `gpukit/results` of the repository, by GPU and "
        "operation, each with its versions and date.\n",
    ]
    for caption, entries in trees.items():
        parts.append(_tree(entries, f":hidden:\n:caption: {caption}\n"))
    return "\n".join(parts)


def _tree(entries: list[str], options: str = "") -> str:
    return f"```{{toctree}}\n:maxdepth: 1\n{options}\n" + "\n".join(entries) + "\n```\n"


class _Links(html.parser.HTMLParser):
    """What a page points to, and the places in it that can be pointed to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.ids.add(value)


def broken_links(site: Path) -> list[str]:
    """Links and images of the site that lead to no file of it, or to no place in one: "page: target"."""
    pages: dict[Path, _Links] = {}
    for path in site.rglob("*.html"):
        pages[path] = _Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            link = urllib.parse.urlsplit(target)
            if link.scheme or link.netloc:
                continue
            file = (path.parent / urllib.parse.unquote(link.path)).resolve() if link.path else path
            missing_place = (
                link.fragment and file in pages and urllib.parse.unquote(link.fragment) not in pages[file].ids
            )
            if not file.exists() or missing_place:
                broken.append(f"{path.relative_to(site)}: {target}")
    return sorted(set(broken))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the course as a site.")
    parser.add_argument("out", type=Path, help="folder of the site; what it holds is replaced")
    out = parser.parse_args(argv).out.resolve()
    from sphinx.cmd.build import build_main

    stage(out / "source")
    status = build_main(["-b", "html", "-q", "--keep-going", "-W", str(out / "source"), str(out / "html")])
    for link in (broken := broken_links(out / "html")):
        print(f"leads nowhere: {link}", file=sys.stderr)
    if not status and not broken:
        print(f"gpukit {gpukit.__version__}: the book is at {out / 'html' / 'index.html'}")
    return int(bool(status or broken))


if __name__ == "__main__":
    sys.exit(main())
