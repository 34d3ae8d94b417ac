"""The live page as a real Chromium shows it: on a desk and on a phone, by day and in the dark."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, Page, Playwright, expect

from tests.harness.gateways import OwnGateway

NAMES = ("chromium", "chromium-browser", "google-chrome")

DESK, LAPTOP = {"width": 1440, "height": 900}, {"width": 1280, "height": 800}

PHONE = {"width": 390, "height": 844}

PATIENCE = 60_000  # milliseconds: the machine may be busy

# The page asks every three seconds.
TEN_TIMES_AS_OFTEN = "const wait = window.setTimeout; window.setTimeout = (call, ms) => wait(call, ms / 10);"

expect.set_options(timeout=PATIENCE)


# What is wider than its place: it scrolls sideways, or is cut off.
TOO_WIDE = """() => [...document.querySelectorAll("html, body, body *")]
  .filter((one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1)
  .map((one) => `${one.tagName} ${one.className}: ${one.textContent.slice(0, 50)}`)"""

# Of all visible texts, those whose contrast with what they stand on is less than WCAG's AA asks of small text.
PALE = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => c <= 10 ? c / 3294.6 : ((c / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const under = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const back = channels(getComputedStyle(at).backgroundColor);
      if (back.length === 3 || back[3] === 1) return back;
    }
    return [255, 255, 255];
  };
  const pale = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const [a, b] = [light(channels(getComputedStyle(element).color)), light(under(element))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) pale.push([element.textContent, (a + .05) / (b + .05)]);
  }
  return pale;
}"""


class Look(NamedTuple):
    """How somebody looks at the page."""

    name: str
    size: dict[str, int]
    scheme: str


LOOKS = (
    Look("desk-light", DESK, "light"),
    Look("desk-dark", DESK, "dark"),
    Look("laptop-light", LAPTOP, "light"),
    Look("laptop-dark", LAPTOP, "dark"),
    Look("phone-light", PHONE, "light"),
    Look("phone-dark", PHONE, "dark"),
)


def chromium(playwright: Playwright) -> Browser:
    """The system's, started."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert path is not None, "Chromium is needed (set-up.sh installs Debian's)"
    return playwright.chromium.launch(executable_path=path)


@contextlib.contextmanager
def opened(browser: Browser, own: OwnGateway, look: Look = LOOKS[0], logged: str | None = None) -> Iterator[Page]:
    """The page; at the end, nothing was logged as an error but what holds `logged`, and nobody else was asked."""
    context = browser.new_context(viewport=look.size, color_scheme=look.scheme, locale="en-GB")
    try:
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.add_init_script(TEN_TIMES_AS_OFTEN)
        complaints: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(own.url + "/ui")
        yield page
        assert page.evaluate("window.broken") is None
        assert asked and all(url.startswith((own.url + "/", "data:")) for url in asked)
        assert [text for text in complaints if logged is None or logged not in text] == []
    finally:
        context.close()


class Pictures(NamedTuple):
    """Where they go, and the looks of which they are taken."""

    folder: Path
    looks: tuple[Look, ...]


def in_every_look(
    browser: Browser, own: OwnGateway, pictures: Pictures, name: str, check: Callable[[Page], None]
) -> None:
    """Open the page in each look, see that it fits and can be read, and take its picture."""
    for look in pictures.looks:
        with opened(browser, own, look) as page:
            expect(page.locator("#figures")).to_be_visible(timeout=PATIENCE)
            check(page)
            page.screenshot(path=pictures.folder / f"{name}-{look.name}.png", full_page=True)
            assert page.evaluate(TOO_WIDE) == []
            assert page.evaluate(PALE) == []
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            darkest = max(int(channel) for channel in background.removeprefix("rgb(").removesuffix(")").split(","))
            assert (darkest < 64) == (look.scheme == "dark")


def is_red(page: Page, selector: str) -> bool:
    """Whether it stands on red, and is in sight without scrolling where it is the alarm."""
    colour = page.evaluate(
        "(one) => getComputedStyle(document.querySelector(one)).backgroundColor.match(/\\d+/g).map(Number)", selector
    )
    return colour[0] > 150 and max(colour[1:3]) < 60
