"""The report of the sweep in Chromium: filter, sort, follow the link of a cell, dark."""

import pytest

from tests.experiments.test_cell_pages import JOB, results

__all__ = ["results"]  # a fixture

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [1440, 390])
def test_the_report_of_the_sweep_works_at_every_width(browser, results, width):
    index = results / "report" / "index.html"
    browser.open(index, width)
    browser.check()
    rows = "[...document.querySelectorAll('#table-1 tbody tr:not([hidden])')]"
    names = f"{rows}.map((row) => row.cells[8].textContent)"
    assert browser.run(names) == ["shard", "pmap", "shard"]
    browser.click("#table-1 th:nth-child(9) button")
    assert browser.run(names) == ["pmap", "shard", "shard"]
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.click("#theme")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != background
    assert browser.run("document.querySelector('#figures img').complete")

    browser.click('a[href$="pmap.html"]')
    browser.check()
    assert JOB.platform in browser.one("h1").text
    assert browser.one("#tree").text == "This step was predicted without a plan."
    assert browser.all("#timelines canvas")
