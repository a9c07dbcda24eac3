"""A person at JupyterLab, played by a headless Chromium: used by tests/notebooks/test_browser.py and by whoever edits a notebook.

    python -m tests.browser notebooks/09_softmax.ipynb      # every cell run; pictures in build/screenshots

The course is copied first, with exercises/ as it is handed out, so nothing in the checkout changes or matters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from gpukit import lab
from gpukit.grading import stubs

ROOT = Path(__file__).resolve().parents[1]
SCREENSHOTS = ROOT / "build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TOKEN = "a-person"
WIDTH, HEIGHT = 1400, 1000
PIECE = 1500  # pixels of a notebook in one picture
# What JupyterLab would ask or hide on its own: no news, and every cell in the page however far down it is.
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}


def why_not() -> str:
    """Why no browser can be driven here, or ""."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed (extra dev)"
    return "" if browser_path() else f"no browser: none of {', '.join(BROWSERS)} is installed"


def browser_path() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Lab:
    """JupyterLab on a copy of the course, and one browser window that shows it. A context manager.

    impl   what the kernels check: "exercises" or "solutions"
    theme  "Light" or "Dark"
    """

    def __init__(self, folder: Path, impl: str = "exercises", theme: str = "Light"):
        self.course = folder / "the course"  # a space, as in many people's paths
        self.folder, self.impl, self.theme = folder, impl, theme
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Lab:
        with contextlib.ExitStack() as stack:  # what was started is stopped, whichever step fails
            self._copy_course()
            self._start_server(stack)
            self._start_browser(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def _copy_course(self) -> None:
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        for name in ("notebooks", "solutions"):
            shutil.copytree(ROOT / name, self.course / name, ignore=ignored)
        stubs.write(self.course)

    def _start_server(self, stack: contextlib.ExitStack) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        own = {f"JUPYTER_{name}_DIR": str(self.folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        settings, workspaces = self.folder / "settings", self.folder / "workspaces"
        own |= {"JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTERLAB_WORKSPACES_DIR": str(workspaces)}
        own |= {"IPYTHONDIR": str(self.folder / "ipython"), "GPUKIT_IMPL": self.impl}
        own |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        for name, values in (SETTINGS | {"apputils-extension/themes": {"theme": f"JupyterLab {self.theme}"}}).items():
            file = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
        options = ["--no-browser", f"--port={port}", f"--IdentityProvider.token={TOKEN}", "--expose-app-in-browser"]
        log = stack.enter_context((self.folder / "jupyterlab.log").open("w"))
        server = subprocess.Popen(
            lab.command(self.course, options), cwd=self.course, env=lab.environment() | own, stdout=log, stderr=log
        )
        stack.callback(_stop, server)
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/api?token={TOKEN}", timeout=5).close()
                return
            if server.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"JupyterLab did not start:\n{(self.folder / 'jupyterlab.log').read_text()}")

    def _start_browser(self, stack: contextlib.ExitStack) -> None:
        from playwright.sync_api import sync_playwright

        playwright = stack.enter_context(sync_playwright())
        quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
        browser = playwright.chromium.launch(executable_path=browser_path(), args=quiet)
        stack.callback(browser.close)
        self.page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        self.page.set_default_timeout(30_000)

    # Looking

    def open(self, path: str) -> None:
        """Show a notebook, such as "notebooks/00_start.ipynb", and wait for its kernel."""
        self.page.goto(f"{self.url}/lab/tree/{path}?token={TOKEN}&reset")
        self.page.wait_for_function(
            "path => window.jupyterapp?.shell.currentWidget?.context?.path === path", arg=path, timeout=60_000
        )
        self.page.wait_for_function(
            "jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'", timeout=60_000
        )
        self.name_cells()

    def name_cells(self) -> None:
        """Give each cell's element its id, so that `cell` finds it."""
        self.page.evaluate(
            "jupyterapp.shell.currentWidget.content.widgets.forEach(c => c.node.dataset.cellId = c.model.id)"
        )

    def cell(self, cell_id: str):
        """The element of a cell, a playwright locator."""
        return self.page.locator(f'[data-cell-id="{cell_id}"]')

    def cell_ids(self, kind: str = "code") -> list[str]:
        """The ids of the open notebook's cells of one kind ("code", "markdown"), in order."""
        return self.page.evaluate(
            "kind => jupyterapp.shell.currentWidget.content.widgets"
            ".filter(c => c.model.type === kind).map(c => c.model.id)",
            kind,
        )

    def cell_output(self, cell_id: str) -> str:
        """What a cell shows, as a person reads it."""
        return self.cell(cell_id).locator(".jp-Cell-outputWrapper").inner_text()

    def failed_cells(self) -> list[str]:
        """The ids of the cells that show an error."""
        return self.page.evaluate(
            "() => jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code' &&"
            " c.model.outputs.toJSON().some(output => output.output_type === 'error')).map(c => c.model.id)"
        )

    def wait_for_output(self, cell_id: str, text: str, timeout_s: float = 60) -> str:
        """Wait until a cell shows `text`; its whole output."""
        self.cell(cell_id).locator(".jp-Cell-outputWrapper", has_text=text).wait_for(timeout=timeout_s * 1000)
        return self.cell_output(cell_id)

    def unfold(self) -> None:
        """Open every folded answer, so that a picture has them."""
        self.page.evaluate("document.querySelectorAll('details').forEach(answer => answer.open = true)")

    def screenshot(self, name: str, whole: bool = False, folder: Path = SCREENSHOTS) -> list[Path]:
        """Keep a picture of the window; with `whole`, of the whole notebook, in pieces that are comfortable to read."""
        folder.mkdir(parents=True, exist_ok=True)
        if not whole:
            self.page.screenshot(path=folder / f"{name}.png")
            return [folder / f"{name}.png"]
        for old in folder.glob(f"{name}-[0-9][0-9].png"):
            old.unlink()
        self.page.set_viewport_size({"width": WIDTH, "height": PIECE + 200})
        self.page.wait_for_timeout(500)  # until JupyterLab has given the notebook its new height
        notebook = self.page.evaluate_handle("jupyterapp.shell.currentWidget.content.outerNode").as_element()
        pieces, step = [], int(notebook.bounding_box()["height"])
        for i, top in enumerate(range(0, notebook.evaluate("node => node.scrollHeight"), step), start=1):
            notebook.evaluate("(node, top) => node.scrollTo(0, top)", top)
            self.page.wait_for_timeout(200)
            pieces.append(folder / f"{name}-{i:02}.png")
            notebook.screenshot(path=pieces[-1])
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        return pieces

    # Doing

    def run_all(self, timeout_s: float = 120) -> None:
        """Run > Run All Cells. As in any notebook, the first cell that raises stops the rest."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_text("Run All Cells", exact=True).click()
        self.wait_until_idle(timeout_s)

    def run_cell(self, cell_id: str, timeout_s: float = 120) -> str:
        """Click into a cell and press Ctrl+Enter; what it then shows. A cell whose source is hidden is chosen without a click,
        which would unfold it."""
        editor = self.cell(cell_id).locator(".jp-InputArea-editor")
        if editor.count():
            editor.click()
        else:
            self.page.evaluate(
                "id => { const shown = jupyterapp.shell.currentWidget.content; shown.mode = 'command';"
                " shown.activeCellIndex = shown.widgets.findIndex(cell => cell.model.id === id); shown.activate(); }",
                cell_id,
            )
        self.page.keyboard.press("Control+Enter")
        self.wait_until_idle(timeout_s)
        return self.cell_output(cell_id)

    def run_each(self, timeout_s: float = 120) -> None:
        """Run every code cell, one after the other, whether or not it raises."""
        for cell_id in self.cell_ids():
            self.run_cell(cell_id, timeout_s)

    def wait_until_idle(self, timeout_s: float = 120) -> None:
        """Wait until no cell runs or waits to run; JupyterLab marks those [*]."""
        self.page.wait_for_timeout(50)
        self.page.wait_for_function(
            "() => { const shown = jupyterapp.shell.currentWidget;"
            " return shown.sessionContext.session?.kernel?.status === 'idle' && shown.content.widgets.every("
            "cell => cell.model.type !== 'code' || !cell.promptNode.textContent.includes('*')); }",
            timeout=timeout_s * 1000,
        )

    def follow(self, cell_id: str, link: str) -> None:
        """Click a link in a text cell that leads to a file, and wait for the file's editor."""
        self.cell(cell_id).get_by_role("link", name=link).click()
        self.page.wait_for_function(
            "link => jupyterapp.shell.currentWidget?.context?.path.endsWith(link) &&"
            " jupyterapp.shell.currentWidget.context.isReady",
            arg=link,
        )
        self.page.locator(".jp-FileEditor:visible .cm-content").wait_for()

    def type_over(self, old: str, new: str) -> None:
        """In the editor in front: select `old`, which occurs once, type `new` over it and save with Ctrl+S."""
        found = self.page.evaluate(
            """old => {
                const editor = jupyterapp.shell.currentWidget.content.editor;
                const source = editor.model.sharedModel.getSource();
                const start = source.indexOf(old), end = start + old.length;
                if (start < 0 || source.indexOf(old, start + 1) >= 0) return false;
                editor.focus();
                editor.setSelection({ start: editor.getPositionAt(start), end: editor.getPositionAt(end) });
                return true;
            }""",
            old,
        )
        if not found:
            raise LookupError(f"{old!r} does not occur exactly once in the file")
        self.page.keyboard.type(new, delay=5)
        self.page.keyboard.press("Control+s")
        self.page.wait_for_function("!jupyterapp.shell.currentWidget.context.model.dirty")

    def show_tab(self, title: str) -> None:
        """Click a document's tab, such as "00_start.ipynb"."""
        self.page.locator(".lm-DockPanel-tabBar .lm-TabBar-tabLabel", has_text=title).click()


def _stop(server: subprocess.Popen) -> None:
    server.terminate()  # JupyterLab ends its kernels, then itself
    try:
        server.wait(timeout=20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run notebooks in JupyterLab and keep pictures of them.")
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--impl", default="exercises", choices=("exercises", "solutions"))
    parser.add_argument("--theme", default="Light", choices=("Light", "Dark"))
    parser.add_argument("--unfold", action="store_true", help="open every folded answer first")
    parser.add_argument("--out", type=Path, default=SCREENSHOTS)
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder), impl=args.impl, theme=args.theme) as person:
        for notebook in args.notebooks:
            person.open(f"notebooks/{notebook.name}")
            person.run_each()
            if args.unfold:
                person.unfold()
            for picture in person.screenshot(f"{notebook.stem}-{args.theme.lower()}", whole=True, folder=args.out):
                print(picture)


if __name__ == "__main__":
    main()
