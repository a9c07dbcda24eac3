"""The cheat sheet: the page in docs/ is what the function makes, and what it says is what the course computes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpukit import cheatsheet, cli, hardware
from tests.browser import BROWSERS

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_in_docs_is_up_to_date(tmp_path):
    assert cli.main(["cheatsheet", "--html", str(tmp_path / "page.html")]) == 0
    made = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert (ROOT / cheatsheet.FILE).read_text(encoding="utf-8") == made, f"gpukit cheatsheet --html {cheatsheet.FILE}"


def test_it_says_what_the_course_computes(capsys):
    assert cli.main(["cheatsheet"]) == 0
    out = capsys.readouterr().out
    assert all(gpu.name in out for gpu in hardware.GPUS)
    assert "Llama 3 8B 131,072 bytes" in out and "295 (H100), 206 (H200)" in out
    assert re.search(r"bf16-adamw +2 +2 +12 +16\n", out)
    assert "32: 16 programs (100% of the warps)" in out


@pytest.mark.browser
@pytest.mark.parametrize("size", ("A4", "letter"))
def test_it_prints_on_one_page(tmp_path, size):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no browser")
    page, pdf = tmp_path / "page.html", tmp_path / "page.pdf"
    page.write_text(cheatsheet.page().replace("size: A4", f"size: {size}"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--no-pdf-header-footer"]
    subprocess.run([browser, *options, f"--print-to-pdf={pdf}", page.as_uri()], check=True, capture_output=True)
    assert len(re.findall(rb"/Type /Page\b", pdf.read_bytes())) == 1
