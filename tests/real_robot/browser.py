"""A real browser for the console's tests: the installed Chromium, driven through Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 60_000  # milliseconds that a page may take on a busy machine


def find_chromium() -> str | None:
    """$CHROMIUM, or the first of the usual names on the path."""
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def missing_browser() -> str:
    """Why no browser can be driven here, or ""."""
    if find_chromium() is None:
        return "no Chromium; apt-get install chromium, or set CHROMIUM"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed; pip install playwright"
    return ""


@contextmanager
def browser() -> Iterator[Any]:
    """A Chromium without a window. Root needs --no-sandbox; the pages are ours."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=arguments, timeout=4 * PATIENCE)
        try:
            yield chromium
        finally:
            chromium.close()


class Person:
    """A page, and the hands on it."""

    def __init__(self, chromium: Any, url: str, width: int = 1280, height: int = 860, touch: bool = False) -> None:
        self.context = chromium.new_context(viewport={"width": width, "height": height}, has_touch=touch)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url)
        # Not wait_for_function: on a busy machine it evaluates text in the page, which the page's policy forbids.
        self.page.wait_for_selector(".name:not(:text-is('connecting'))")

    def take_control(self, name: str = "Anna", token: str = "") -> None:
        self.page.click(".control")
        self.page.fill("#ask-name", name)
        if token:
            self.page.fill("#ask-token", token)
        self.page.click("#ask-ok")
        self.page.wait_for_selector(".holder:text-matches('You have control')")

    def click(self, button: str) -> None:
        """Once it is enabled."""
        self.page.click(f"[data-button={button}]:enabled")

    def key(self, key: str, button: str) -> None:
        """A key, once its button is enabled."""
        self.page.wait_for_selector(f"[data-button={button}]:enabled")
        self.page.keyboard.press(key)

    def await_phase(self, phase: str) -> None:
        self.page.wait_for_selector(f".phases li.now[data-phase={phase}]")

    def await_mode(self, mode: str) -> None:
        self.page.wait_for_selector(f".mode.{mode}")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)
