"""The report page in Chromium, on a desktop and on a phone: filter, zoom, find, dark."""

import json

import pytest
from selenium.webdriver.common.keys import Keys

import autopar
from autopar.report import Alternative, plan_report, save_report
from autopar.report.timeline_rows import MAX_SPANS
from tests.autopar.report.test_report_page import ARGS, HOSTILE, METHODS, step

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return a page with a whole step and a pipeline, and with hostile names."""
    reports = []
    for name, method in METHODS.items():
        plan = autopar.plan_step(step, ARGS, method=method, cluster="dgx_h100")
        plan = plan.model_copy(update={"warnings": (HOSTILE,)})
        reports.append(
            plan_report(f"{name} {HOSTILE}", plan, step, ARGS, "dgx_h100", fidelity="analytic")
        )
    path = tmp_path_factory.mktemp("page") / "report.html"
    others = [Alternative(f"other {n} {HOSTILE}", 1e-4 * n, 1e6 / n) for n in range(1, 5)]
    save_report(path, reports, others, command=HOSTILE)
    return path


@pytest.mark.parametrize("width", [1440, 390])
def test_a_report_works_at_every_width(browser, page, width):
    browser.open(page, width)
    browser.check()
    assert len(browser.all("#bars .bar-row")) == 2
    assert len(browser.all("#rooflines figure")) == 2
    assert len(browser.all("#pareto circle")) == 6
    assert browser.run("document.querySelector('#memories svg polygon') !== null")

    box = browser.one("#tree input")
    shown = "[...document.querySelectorAll('#tree tbody tr')].filter((row) => !row.hidden).length"
    assert browser.run(shown) >= 2
    box.send_keys("128,64")  # the array of the second parameter alone
    assert browser.run(shown) == 1
    assert browser.one("#tree output").text == "1 of 2 arrays"
    box.send_keys("no such parameter")
    assert browser.run(shown) == 0

    start, end = browser.run("[timelineView.start, timelineView.end]")
    browser.click('[aria-label="Zoom in"]')
    zoomed = browser.run("[timelineView.start, timelineView.end]")
    assert zoomed[1] - zoomed[0] == pytest.approx((end - start) / 2)
    canvas = browser.one(".timeline canvas")
    canvas.send_keys("+")
    canvas.send_keys(Keys.ARROW_RIGHT)
    moved = browser.run("[timelineView.start, timelineView.end]")
    assert moved[0] > zoomed[0]
    assert moved[1] - moved[0] < zoomed[1] - zoomed[0]
    canvas.send_keys("0")
    assert browser.run("[timelineView.start, timelineView.end]") == pytest.approx([start, end])

    browser.one('[aria-label^="Find spans"]').send_keys("memory")
    assert all("spans match" in output.text for output in browser.all(".timeline output"))

    dark = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.click("#theme")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != dark
    assert browser.one("#theme").get_attribute("aria-pressed") == "true"
    browser.check()


def test_names_of_users_are_text_in_the_browser(browser, page):
    browser.open(page, 1440)
    text = browser.run("document.body.textContent")
    assert text.count(HOSTILE) > 10
    assert (
        browser.run("document.querySelectorAll('script').length") == len(browser.all("script")) < 12
    )
    assert browser.one("#warnings li").text.startswith("</script><script>alert(1)</script>")


def test_a_table_sorts_by_numbers_and_filters(browser, page):
    browser.open(page, 1440)
    rows = "[...document.querySelectorAll('#alternatives tbody tr:not([hidden])')]"
    cells = f"{rows}.map((row) => row.cells[1].dataset.value)"
    browser.click("#alternatives th:nth-child(2) button")
    times = list(map(float, browser.run(cells)))
    assert times == sorted(times)
    browser.click("#alternatives th:nth-child(2) button")
    assert list(map(float, browser.run(cells))) == sorted(times, reverse=True)
    browser.check()


def test_a_page_with_the_most_spans_answers_quickly(browser, page, tmp_path):
    text = page.read_text()
    start = text.index('id="data">') + len('id="data">')
    end = text.index("</script>", start)
    data = json.loads(text[start:end])
    rows = data["plans"][0]["prediction"]["timeline"]
    lane = rows["spans"][-1][0]
    length = rows["microseconds"] / MAX_SPANS
    busy = 0.9 * length
    rows["spans"] = [[lane, n * length, busy, 0, 0, 0, 0, busy] for n in range(MAX_SPANS)]
    path = tmp_path / "long.html"
    path.write_text(text[:start] + json.dumps(data).replace("<", "\\u003c") + text[end:])
    browser.open(path, 1440)
    browser.check()
    milliseconds = browser.driver.execute_async_script(
        "const done = arguments[0]; const from = performance.now();"
        "document.querySelector('[aria-label=\"Zoom in\"]').click();"
        "requestAnimationFrame(() => done(performance.now() - from));"
    )
    assert milliseconds < 1000  # about 30 on a quiet machine
    browser.check()
