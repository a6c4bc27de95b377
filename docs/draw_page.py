"""Draw the live page, light and dark: `python docs/draw_page.py DIRECTORY MODEL`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

DRAFTS = {"method": "suffix", "num_speculative_tokens": 8, "policy": "adaptive"}
QUESTIONS = (
    "Copy this word for word: Peel six potatoes, two carrots and one onion. Cut the potatoes, the "
    "carrots and the onion into small pieces.",
    "Write one sentence about rain.",
)


def chat(page: Page) -> None:
    """Two questions, with a moment for the plots."""
    for question in QUESTIONS:
        page.locator("#send:enabled").wait_for()
        page.locator("#prompt").fill(question)
        page.locator("#prompt").press("Enter")
        page.wait_for_timeout(300)
        page.locator("#status", has_text="Answered").wait_for()
    page.wait_for_timeout(2500)


def draw(directory: Path, model: str) -> None:
    """Raises SystemExit without a browser."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        sys.exit("no chromium found: install it (apt-get install chromium)")
    directory.mkdir(parents=True, exist_ok=True)
    options = ["--port", "0", "--json", "--speculative-config", json.dumps(DRAFTS)]
    code = "import sys; from foredraft.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", model, *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
            page.goto(url)
            chat(page)
            page.screenshot(path=directory / "light.png", full_page=True)
            page.locator("#theme").click()
            page.screenshot(path=directory / "dark.png", full_page=True)
            browser.close()
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), sys.argv[2])
