"""The book: what is staged for Sphinx, what docstrings become, and how links are looked at; and the whole where Sphinx is."""

import importlib.util
import warnings
from pathlib import Path

import pytest

from gpukit.classroom import leaks

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def book():
    spec = importlib.util.spec_from_file_location("book", ROOT / "docs" / "book.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def staged(book, tmp_path_factory):
    folder = tmp_path_factory.mktemp("book") / "source"
    book.stage(folder)
    return folder


def test_no_line_of_a_solution_is_staged(staged):
    """The library's own code is shown, as in the wheel; what a learner is to write is not."""
    pages = [path for path in staged.rglob("*.md") if not path.stem.startswith(("gpukit-kernels", "gpukit-validation"))]
    own = staged.parent / "own"
    for path in [*pages, *staged.rglob("*.ipynb")]:
        copy = own / path.relative_to(staged)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert not leaks.scan(own, ROOT)
    assert not [path for path in staged.rglob("*") if "solutions" in path.name]


def test_every_lesson_and_stub_has_a_page(staged):
    assert len([*staged.glob("notebooks/*.ipynb")]) == len([*ROOT.glob("notebooks/*.ipynb")])
    stubs = {path.stem.removeprefix("exercises-") for path in staged.glob("files/exercises-*.md")}
    assert stubs == {f"{path.stem}.py" for path in ROOT.glob("exercises/*.py")}


def test_docstrings_become_paragraphs_and_lists(book):
    text = "Sum of `x_1` and y_2.\n\nrows   how many,\n       from 1 up\ndim    which < 4\n\nRaises ValueError."
    assert book._prose(text) == [
        "Sum of `x_1` and y\\_2.", "",
        "- `rows`: how many,", "  from 1 up", "- `dim`: which \\< 4", "",
        "Raises ValueError.", "",
    ]  # fmt: skip


def test_a_long_signature_has_a_line_for_each_parameter(book):
    def f(
        first: "dict[str, int]", *, second_parameter: "tuple[int, str]" = (1, "a"), third: "float" = 1e-05
    ) -> "str": ...

    assert book._signature("name", f) == (
        "name(\n    first: dict[str, int],\n    *,\n    second_parameter: tuple[int, str] = (1, 'a'),\n"
        "    third: float = 1e-05,\n) -> str"
    )
    assert book._signature("go", lambda x, y=2: x) == "go(x, y=2)"


def test_the_first_page_lists_the_lessons_as_the_readme_does(staged):
    index = (staged / "index.md").read_text()
    assert all(f"](notebooks/{path.name})" in index for path in ROOT.glob("notebooks/*.ipynb"))
    assert "## How an exercise works" not in index


def test_links_of_outputs_and_to_what_is_for_contributors(book, staged):
    documents = book._relinked("[a](CONTRIBUTING.md) [b](CHANGELOG.md)", "", {}, ROOT)
    assert documents == "[a](/index.md) [b](CHANGELOG.md)"
    text = (staged / "notebooks" / "14_kv_cache.ipynb").read_text()
    assert "](../files/gpukit-kernels-decode_attention.py.html)" in text  # in an output, which Sphinx leaves as it is
    assert (staged / "files" / "gpukit-kernels-decode_attention.py.md").is_file()


def test_links_that_lead_nowhere_are_found(book, tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">x</a> <a href="https://x.y">x</a> <img src="c.png"> <a href="#q">'
    )
    (tmp_path / "b.html").write_text('<p id="here"><a href="a.html">x</a><a href="a.html#no">x</a>')
    assert book.broken_links(tmp_path) == ["a.html: #q", "a.html: c.png", "b.html: a.html#no"]


def test_the_book_is_built_and_its_links_hold(book, tmp_path, capsys):
    pytest.importorskip("sphinx", reason="the extra `book` is not installed; `make book` does")
    pytest.importorskip("myst_nb", reason="the extra `book` is not installed; `make book` does")
    with warnings.catch_warnings():  # of Sphinx about MyST-NB
        warnings.simplefilter("ignore")
        assert book.main([str(tmp_path)]) == 0, capsys.readouterr().err
    assert (tmp_path / "html" / "search.html").exists()
