"""The live page in a real browser, against the real server and model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page

from .browser import ask, chromium
from .test_serve import client_of, served

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
TEXT = "Say twice: <script>alert(1)</script> <img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def said(smollm2_path: Path) -> Iterator[dict[str, Any]]:
    options = ("--speculative-config", DRAFTS, "--served-model-name", "smollm2")
    with served(smollm2_path, *options) as (_, told):
        yield told


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def opened(browser: Browser, url: str, **options: Any) -> tuple[Page, list[str], list[str]]:
    """The page, what its console complains of, and the addresses it asks for."""
    page = browser.new_context(**options).new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    return page, complaints, asked


# Every plot holds a line or a bar; and those of lines move as time goes on.
DRAWN = """() => [...document.querySelectorAll('svg.plot')].every(
  plot => plot.querySelector('rect') || plot.querySelector('.line')?.getAttribute('d'))"""
SHAPES = "all => all.map(plot => plot.innerHTML)"
MOVED = """[...document.querySelectorAll('svg.plot:has(.line)')].every(
  (plot, at) => plot.innerHTML != before[at])"""
CONTROLS = "button, input, select, textarea"


def test_a_chat_by_keyboard_is_coloured_as_the_api_flags_it(
    browser: Browser, said: dict[str, Any]
) -> None:
    page, complaints, asked = opened(browser, said["url"])
    page.locator("#send:enabled").wait_for()
    page.locator("#tokens").fill("48")
    ask(page, TEXT)
    tokens = page.locator(".turn .token").evaluate_all(
        "all => all.map(each => [each.textContent, each.dataset.origin])"
    )
    answer = client_of(said).chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": TEXT}],
        temperature=0, seed=1, max_tokens=48, extra_body={"return_token_origins": True},
    )  # fmt: skip
    choice = answer.choices[0]
    assert "".join(text for text, _ in tokens) == choice.message.content
    flags = choice.model_extra["tokens"] if choice.model_extra else []
    assert tokens == [[each["text"], each["origin"]] for each in flags]
    assert page.locator(".turn script, .turn img").count() == 0
    assert page.locator(".turn .said").first.text_content() == TEXT
    page.wait_for_function(DRAWN)
    before = page.locator("svg.plot:has(.line)").evaluate_all(SHAPES)
    page.wait_for_function(f"before => {MOVED}", arg=before)
    page.locator("#facts dt").first.wait_for()
    page.locator("#drafter").select_option("plain")
    page.locator("#again").press("Enter")
    page.get_by_text("the same text as before").wait_for()
    assert complaints == []
    assert [url for url in asked if not url.startswith(said["url"])] == []


def test_controls_have_names_and_a_phone_scrolls_one_way(
    browser: Browser, said: dict[str, Any]
) -> None:
    phone = {"width": 360, "height": 740}
    page, complaints, _ = opened(browser, said["url"], viewport=phone, color_scheme="dark")
    root = page.locator("html")
    assert root.get_attribute("data-theme") == "dark"
    page.locator("#theme").press("Enter")
    assert root.get_attribute("data-theme") == "light"
    assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
    for control in page.locator(CONTROLS).all():
        name = control.evaluate(
            "e => e.ariaLabel || (e.tagName == 'BUTTON' ? e : e.labels[0])?.textContent.trim()"
        )
        assert name, control
    page.locator("#send:enabled").wait_for()
    shown = page.locator(CONTROLS).filter(visible=True)
    wanted = set(shown.evaluate_all("all => all.filter(e => !e.disabled).map(e => e.id)"))
    reached = set()
    for _ in range(4 * len(wanted)):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert wanted <= reached
    assert complaints == []


def test_without_the_page_there_is_none_and_a_key_guards_what_it_shows(tiny: Path) -> None:
    with served(tiny, "--no-page") as (_, told):
        assert httpx.get(f"{told['url']}/", timeout=60).status_code == 404
        assert httpx.get(f"{told['url']}/live", timeout=60).status_code == 404
    with served(tiny, "--api-key", "one") as (_, told):
        page = httpx.get(f"{told['url']}/", timeout=60)
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert httpx.get(f"{told['url']}/live", timeout=60).status_code == 401
        keys = {"authorization": "Bearer one"}
        live = httpx.get(f"{told['url']}/live", headers=keys, timeout=60)
        assert live.json()["counts"]["generated_tokens"] == 0
