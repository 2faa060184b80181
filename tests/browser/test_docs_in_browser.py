"""The documentation in Chromium: on a phone, wide tables and code scroll inside the page."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

OVERFLOWING = """
[...document.querySelectorAll('.md-content *')].filter((element) => {
  const box = element.getBoundingClientRect();
  if (box.width === 0 || box.right <= innerWidth + 1) return false;
  for (let outer = element.parentElement; outer; outer = outer.parentElement) {
    if (outer.classList.contains('md-content')) return true;
    if (getComputedStyle(outer).overflowX !== 'visible') return false;
  }
  return true;
}).map((element) => element.tagName + ' ' + element.textContent.trim().slice(0, 60))
"""
"""The elements beyond the window that no element around them scrolls or clips."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return site


@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_in_the_documentation_is_wider_than_the_window(browser, site, width):
    pages = sorted(site.rglob("index.html"))
    assert len(pages) > 20
    for page in pages:
        browser.open(page, width)
        assert (page.parent.name, browser.run(OVERFLOWING)) == (page.parent.name, [])
        wide, window = browser.run("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window, page
