"""A headless Chromium of the system's, and a server with the live page for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, sync_playwright

MISSING = "no chromium found: install it (apt-get install chromium)"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Raises RuntimeError, saying what to install, where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise RuntimeError(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def ask(page: Any, text: str) -> None:
    """Send a message by keyboard and wait for the whole answer."""
    page.locator("#send:enabled").wait_for()
    page.locator("#prompt").focus()
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    page.locator("#status", has_text="Answered").wait_for()
