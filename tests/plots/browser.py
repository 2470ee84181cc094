"""A real browser on a page, and what tests ask of it."""

import time
from pathlib import Path
from typing import Any


class Page:
    """A browser on one page, and what tests ask of it."""

    def __init__(self, driver: Any, uri: str, downloads: Path) -> None:
        self.driver, self.uri, self.downloads = driver, uri, downloads

    def open(self, address: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(self.uri + address)
        self.until("Number(document.documentElement.dataset.drawn || 0) > 0")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def get(self, expression: str) -> Any:
        return self.run(f"return {expression}")

    def until(self, expression: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 40).until(lambda driver: driver.execute_script(f"return {expression}"))

    def count(self, selector: str) -> int:
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def click(self, selector: str) -> None:
        element = self.driver.find_element("css selector", selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def drawn(self) -> int:
        return int(self.get("document.documentElement.dataset.drawn"))

    def redrawn(self, before: int) -> None:
        self.until(f"Number(document.documentElement.dataset.drawn) > {before}")

    def downloaded(self, name: str) -> str:
        until = time.monotonic() + 30
        while not (self.downloads / name).is_file():
            assert time.monotonic() < until, f"{name} was not downloaded"
            time.sleep(0.05)
        return (self.downloads / name).read_text()

    def set_size(self, size: dict[str, Any] | None) -> None:
        if size is None:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        else:
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        touch = {"enabled": size is not None, "maxTouchPoints": 1}
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", touch)
