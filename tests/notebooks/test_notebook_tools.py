"""Canonical notebooks: `gpukit nb clean` and `gpukit nb run`, on notebooks made here; then the course's own."""

import ast
import base64
import copy
import io
import json
import os

import nbformat
import numpy as np
import pytest
from PIL import Image

from gpukit import course, notebooks
from gpukit.grading import stubs
from gpukit.grading.check_cells import COMPILER, UNCOMPARED
from gpukit.notebooks import NotebookFailed, clean, problems, run, write

PNG = base64.b64encode(b"\x89PNG" + bytes(60)).decode()
ADDRESS = "<matplotlib.lines.Line2D at 0x7f12ab34cd56>"


def code(source, *outputs, cell_id="a", **more):
    content = {"cell_type": "code", "id": cell_id, "metadata": {}, "execution_count": 7, "source": source}
    return {**content, "outputs": list(outputs), **more}


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def shown(kind="display_data", metadata=None, **data):
    data = {mime.replace("__", "/"): value for mime, value in data.items()}
    count = {"execution_count": 41} if kind == "execute_result" else {}
    return {"output_type": kind, "data": data, "metadata": metadata or {}, **count}


def notebook(*cells, **metadata):
    return {"cells": list(cells), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


MESSY = notebook(
    {"cell_type": "markdown", "id": "intro", "metadata": {"collapsed": True}, "source": ["# Title  \n", "text"]},
    code(
        "import time  \nprint(1)\n",
        stream(["1  \n", "2\n"]),
        stream("late\n", "stderr"),
        stream("10%\r100%\n3\n"),
        metadata={"tags": ["keep"], "execution": {"iopub.status.busy": "2025"}, "scrolled": True, "jupyter": {}},
    ),
    code(
        "plot()",
        shown("execute_result", text__plain=[ADDRESS]),
        shown(image__png=PNG + "\n", text__plain="<Figure size 640x320>", metadata={"needs_background": "light"}),
        shown(**{notebooks._WIDGET_VIEW: {"model_id": "abc"}, "text/plain": "bit viewer", "text/html": "<b>1</b>"}),
        shown(**{notebooks._WIDGET_VIEW: {"model_id": "abc"}}),
    ),  # the same id again
    code("1 / 0", {"output_type": "error", "ename": "E", "evalue": "\x1b[1mno\x1b[0m", "traceback": ["/home/me/x"]}),
    code('import gpukit; gpukit.check("alpha.first")', stream("PASS\n"), cell_id="no good id"),
    code("", execution_count=None, outputs=[]) | {"id": None},
    kernelspec={"name": "my-env", "display_name": "mine"},
    language_info={"name": "python", "version": "3.12.1"},
    widgets={"application/vnd.jupyter.widget-state+json": {"state": {}}},
)  # fmt: skip


def test_clean_makes_the_canonical_form():
    before = copy.deepcopy(MESSY)
    nb = clean(MESSY)
    assert MESSY == before
    nbformat.validate(nbformat.from_dict(nb))
    assert nb["metadata"] == notebooks._METADATA
    assert [cell["id"] for cell in nb["cells"]] == ["intro", "a", "cell-3", "cell-4", "cell-5", "cell-6"]
    assert [cell["execution_count"] for cell in nb["cells"][1:]] == [1, 2, 3, 4, 5]
    assert nb["cells"][0] == {"cell_type": "markdown", "id": "intro", "metadata": {}, "source": "# Title\ntext"}
    first, plot, failing, check, empty = nb["cells"][1:]
    assert first["source"] == "import time\nprint(1)"
    assert first["metadata"] == {"tags": ["keep"]}
    assert first["outputs"] == [stream("1\n2\n100%\n3\n"), stream("late\n", "stderr")]
    assert [output["data"] for output in plot["outputs"]] == [
        {"text/plain": "<matplotlib.lines.Line2D at 0x...>"},
        {"image/png": PNG, "text/plain": "<Figure size 640x320>"},
        {"text/plain": "bit viewer", "text/html": "<b>1</b>"},
    ]
    assert plot["outputs"][0]["execution_count"] == 2
    assert failing["outputs"] == [{"output_type": "error", "ename": "E", "evalue": "no", "traceback": []}]
    assert check["outputs"] == [] and empty["outputs"] == []


def test_clean_is_idempotent_and_leaves_numbers_alone():
    once = clean(MESSY)
    assert clean(once) == once
    assert write(clean(json.loads(write(once)))) == write(once)
    text = "inf is 0x7f800000 and 0x7f80000000, at 0x10000000."
    assert clean(notebook(code("x", stream(text))))["cells"][0]["outputs"] == [stream(text)]


def test_file_is_written_as_nbformat_writes_it(tmp_path):
    path = tmp_path / "x.ipynb"
    nbformat.write(nbformat.from_dict(clean(MESSY)), path)
    assert path.read_text() == write(clean(MESSY))


def test_problems_are_lines(tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps(MESSY))
    assert problems(path) == ["x.ipynb is not canonical: gpukit nb clean x.ipynb"]
    path.write_text(write(clean(MESSY)))
    assert problems(path) == []
    large = base64.b64encode(os.urandom(100_001)).decode()
    path.write_text(write(clean(notebook(code("plot()", shown(image__png=large))))))
    assert problems(path) == ["x.ipynb, cell a: image/png of 100,001 bytes, allowed are 100,000"]
    path.write_text(write(clean(notebook(code("print(1)", stream("1\n" * 400_000))))))
    assert "bytes, allowed are 1,000,000" in problems(path)[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{\n]", "x.ipynb is not JSON: line 2, "),
        (b"\xff\xfe", "x.ipynb is not UTF-8 text"),
        (b"{}", "x.ipynb has no list of cells"),
        (b'{"cells": [1]}', "x.ipynb has no list of cells"),
    ],
)
def test_damaged_files_get_a_sentence(tmp_path, text, sentence):
    (tmp_path / "x.ipynb").write_bytes(text)
    assert problems(tmp_path / "x.ipynb")[0].startswith(sentence)
    with pytest.raises(NotebookFailed, match=sentence):
        run(tmp_path / "x.ipynb")


def test_find(tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("01_b", "00_a"):
        (folder / f"{name}.ipynb").write_text("{}")
    monkeypatch.chdir(folder)
    paths = sorted(folder.glob("*.ipynb"))
    assert notebooks.find([], tmp_path) == paths
    assert notebooks.find(["00_a.ipynb", "01_b", "../notebooks/00_a.ipynb"], tmp_path) == [paths[0], paths[1], paths[0]]
    with pytest.raises(NotebookFailed, match="there is no notebook 02_c"):
        notebooks.find(["02_c"], tmp_path)


# ---- run
def test_running_twice_changes_nothing(tmp_path):
    path = tmp_path / "x.ipynb"
    cells = [
        code("import os; print(os.environ['GPUKIT_IMPL'], os.path.basename(os.getcwd()))"),
        code("object()"),
        code("import ipywidgets; ipywidgets.IntSlider(3)"),
        code("import time; print(time.time_ns())", cell_id="clock", metadata={"tags": ["hardware"]}),
        code("1 / 0", metadata={"tags": ["raises-exception"]}),
        code("input()", stream("as saved\n"), metadata={"tags": ["nbval-skip"]}),
    ]
    cells.append(code("import gpukit; gpukit.check('no.such')"))  # would raise: check cells are not run
    path.write_text(json.dumps(notebook(*cells)))
    assert run(path, save=False) and json.loads(path.read_text()) == notebook(*cells)
    assert run(path)
    text = path.read_text()
    outputs = [cell["outputs"] for cell in json.loads(text)["cells"]]
    assert outputs[0][0]["text"] == [f"exercises {tmp_path.name}\n"]
    assert outputs[1][0]["data"]["text/plain"] == ["<object at 0x...>"]
    assert outputs[2][0]["data"] == {"text/plain": ["IntSlider(value=3)"]}
    assert outputs[4][0]["ename"] == "ZeroDivisionError"
    assert outputs[5] == [stream(["as saved\n"])]
    assert run(path) == []
    assert path.read_text() == text
    assert [cell["metadata"] for cell in json.loads(text)["cells"]] == [cell["metadata"] for cell in cells]
    assert problems(path) == []
    assert run(path, refresh=True) == ["clock"]  # it has moved on
    assert path.read_text() != text


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("raise ValueError('no\\nmore')", "x.ipynb, cell bad: ValueError: no"),
        ("import logging; logging.warning('careful')", "x.ipynb, cell bad writes to stderr: WARNING:root:careful"),
        ("import os; os._exit(1)", "x.ipynb, cell bad: the kernel died"),
        ("import time; time.sleep(30)", "x.ipynb, cell bad: no end after 1 s"),
    ],
)
def test_a_failed_run_names_the_cell_and_keeps_the_file(tmp_path, source, sentence):
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps(notebook(code("x = 1"), code(source, cell_id="bad"), code("y = 2", cell_id="c"))))
    before = path.read_text()
    with pytest.raises(NotebookFailed) as failed:
        run(path, timeout_s=1 if "sleep" in source else 30)
    assert str(failed.value).startswith(sentence)
    assert path.read_text() == before


def test_stderr_is_allowed_where_it_is_tagged(tmp_path):
    path = tmp_path / "x.ipynb"
    source = "import logging; logging.warning('measured')"
    path.write_text(json.dumps(notebook(code(source, metadata={"tags": ["hardware"]}))))
    run(path)
    assert "measured" in path.read_text()


def test_a_picture_that_looks_the_same_keeps_its_bytes(tmp_path):
    def png(value, level):
        pixels = np.full((8, 8, 3), value)
        pixels[0, 0] += 0.05
        file = io.BytesIO()
        Image.fromarray((255 * pixels).astype(np.uint8)).save(file, format="png", compress_level=level)
        return base64.b64encode(file.getvalue()).decode()

    path = tmp_path / "x.ipynb"
    show = "import base64; from IPython.display import Image; Image(base64.b64decode('{}'))"
    path.write_text(json.dumps(notebook(code(show.format(png(0.5, 0))))))
    run(path)
    nb = json.loads(path.read_text())
    for other, changed in ((png(0.5, 9), []), (png(0.52, 0), []), (png(0.7, 0), ["a"])):
        nb["cells"][0]["source"] = show.format(other)
        path.write_text(json.dumps(nb))
        assert run(path, save=False) == changed


# ---- the course's own notebooks
NOTEBOOKS = sorted((course.root(__file__) / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_canonical(path):
    assert problems(path) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs_are_what_the_stubs_give(path):
    """`answers` cells and pictures too, which `pytest --nbval` does not compare. That the cells run of which nothing is compared
    is proven there."""
    assert course.root(__file__) == path.parents[1] and not stubs.drift(path.parents[1])
    stale = run(path, save=False, leave_out=measured_alone(notebooks.read(path)))
    assert not stale, f"{path.name} shows something else in {', '.join(stale)}: look, then `gpukit nb run {path.stem}`"


def measured_alone(nb) -> set[str]:
    """The ids of the cells tagged "hardware" that define nothing which a cell with a compared output uses, itself or through
    others: the training run of the capstone, for instance."""
    out, used = set(), set()
    for cell in reversed([cell for cell in nb["cells"] if cell["cell_type"] == "code"]):
        nodes = list(ast.walk(ast.parse("".join(cell["source"]))))
        defined = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        if notebooks.HARDWARE in cell["metadata"].get("tags", ()) and not defined & used:
            out.add(cell["id"])
        else:
            used |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return out


def test_which_cells_nobody_compares():
    hardware = {"metadata": {"tags": ["hardware"]}}
    nb = notebook(
        code("import math\nx = 1", cell_id="made", **hardware),
        code("def f():\n    return x", cell_id="through", **hardware),
        code("y = f()", cell_id="timed", **hardware),
        code("f()", cell_id="compared"),
        code("x", cell_id="alone", **hardware),
    )
    assert measured_alone(clean(nb)) == {"timed", "alone"}


def test_cells_that_are_left_out_keep_what_is_saved(tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_text(write(clean(notebook(code("1 / 0", stream("saved\n")), code("print(2)", cell_id="b")))))
    assert run(path, save=False, leave_out={"a"}) == ["b"]
    run(path, leave_out={"a"})
    assert [cell["outputs"][0]["text"] for cell in json.loads(path.read_text())["cells"]] == [["saved\n"], ["2\n"]]


def test_cells_carry_known_tags_only():
    known = {*UNCOMPARED, COMPILER, "raises-exception"}
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            unknown = set(cell["metadata"].get("tags", ())) - known
            assert not unknown, f"{path.name}, cell {cell['id']}: unknown tag {', '.join(unknown)}"
