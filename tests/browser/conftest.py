"""A headless Chromium with the widths of a desktop and of a phone."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-prefers-reduced-motion"),
)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a WebDriver of the system's Chromium."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("no chromium and chromedriver; apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=Service(DRIVER)) as driver:
        yield driver


class Browser:
    """A page in the browser.

    Attributes:
        driver: the WebDriver.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, width: int) -> None:
        """Load a file in a window of some width."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(path.as_uri())

    def run(self, script: str) -> Any:
        """Return the value of JavaScript's expression."""
        return self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() =>"
            f" done({script})));"
        )

    def all(self, selector: str) -> list[Any]:
        """Return the elements that a CSS selector matches."""
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        """Return the first element that a CSS selector matches."""
        return self.driver.find_element("css selector", selector)

    def click(self, selector: str) -> None:
        """Click the first element that a CSS selector matches, away from the navigation."""
        element = self.one(selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def check(self) -> None:
        """Check that the console has no message, and that the page isn't wider than the window."""
        assert [entry["message"] for entry in self.driver.get_log("browser")] == []
        wide, window = self.run("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window


@pytest.fixture
def browser(driver: Any) -> Browser:
    """Return the browser, with an empty console."""
    driver.get("about:blank")
    driver.get_log("browser")
    return Browser(driver)
