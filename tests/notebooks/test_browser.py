"""A person's first quarter of an hour, in real JupyterLab. Its pictures are kept in build/screenshots: look at them."""

import pytest

from tests.browser import Lab, why_not

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with Lab(tmp_path_factory.mktemp("person")) as lab:
        yield lab


def test_first_exercise_from_wrong_to_right(person):
    check = "check-start-bytes-moved"
    person.open("notebooks/00_start.ipynb")
    person.run_all()
    person.screenshot("start-1-run-all")
    assert person.failed_cells() == [check], "with the stub as handed out, the check fails and nothing else"
    first = person.cell_output(check)
    assert first.startswith("start.bytes_moved: values differ") and "Traceback" not in first
    assert len(first.strip().splitlines()) <= 8

    person.follow("first-check", "exercises/start.py")
    person.type_over("return M * N * itemsize", "return 2 * M * N")
    person.screenshot("start-2-wrong-answer")
    person.show_tab("00_start.ipynb")
    wrong = person.run_cell(check)
    person.screenshot("start-3-diagnosis")
    assert "these are elements" in wrong and "Which argument has not been used?" in wrong

    person.show_tab("start.py")
    person.type_over("return 2 * M * N", "return 2 * M * N * itemsize")
    person.show_tab("00_start.ipynb")
    assert person.run_cell(check).strip() == "PASS start.bytes_moved  7/7"
    person.screenshot("start-4-pass")
    person.run_all()
    assert person.failed_cells() == []
    person.screenshot("start-5-whole", whole=True)


@pytest.mark.prove
def test_a_flipped_bit_changes_the_value(person):
    person.open("notebooks/01_dtypes.ipynb")
    person.run_all()
    viewer = person.page.locator(".jp-CodeCell", has=person.page.locator(".gpukit-bit")).first
    value = viewer.get_by_label("value").first
    sign = viewer.locator(".gpukit-bit").first
    before, shown = value.input_value(), sign.inner_text()
    sign.click()
    person.page.wait_for_function("([node, before]) => node.value !== before", arg=[value.element_handle(), before])
    person.screenshot("dtypes-1-flipped-bit")
    assert float(value.input_value()) == -float(before)
    assert {shown, sign.inner_text()} == {"0", "1"}
