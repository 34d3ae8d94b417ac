"""The live page in a real Chromium: every state, on a desk and on a phone, by day and in the dark.

Pictures of all of them are left in pytest's folder; `--basetemp DIR` says where.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from proxy.bench.harness.servers import free_port
from tests.harness.api_keys import bearer, secret
from tests.harness.gateways import CHAT, OwnGateway, chat, compared, own_gateway
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.waiting import wait_for

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


SIZES = {"desk": (1440, 900), "laptop": (1280, 800), "phone": (390, 844)}

LOOKS = tuple(
    Look(f"{name}-{scheme}", {"width": width, "height": height}, scheme)
    for name, (width, height) in SIZES.items()
    for scheme in ("light", "dark")
)


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


def is_red(page: Page, selector: str) -> bool:
    """Whether it stands on red, and is in sight without scrolling where it is the alarm."""
    colour = page.evaluate(
        "(one) => getComputedStyle(document.querySelector(one)).backgroundColor.match(/\\d+/g).map(Number)", selector
    )
    return colour[0] > 150 and max(colour[1:3]) < 60


EVIL = "<script>window.broken = 1</script>"

EVIL_MODEL = "<img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    assert path is not None, "Chromium is needed (set-up.sh installs Debian's)"
    with sync_playwright() as playwright, contextlib.closing(playwright.chromium.launch(executable_path=path)) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures", numbered=False)


@pytest.fixture(
    params=[pytest.param(LOOKS[5:], id="one look"), pytest.param(LOOKS[:5], id="others", marks=pytest.mark.thorough)]
)
def in_every_look(request, browser, folder) -> Callable[[OwnGateway, str, Callable[[Page], None]], None]:
    """Opens the page in each look, sees that it fits and can be read, and takes its picture."""

    def in_every_look(own: OwnGateway, name: str, check: Callable[[Page], None]) -> None:
        for look in request.param:
            with opened(browser, own, look) as page:
                expect(page.locator("#figures")).to_be_visible(timeout=PATIENCE)
                check(page)
                page.screenshot(path=folder / f"{name}-{look.name}.png", full_page=True)
                assert page.evaluate(TOO_WIDE) == []
                assert page.evaluate(PALE) == []
                background = page.evaluate("getComputedStyle(document.body).backgroundColor")
                darkest = max(int(channel) for channel in re.findall(r"\d+", background))
                assert (darkest < 64) == (look.scheme == "dark")

    return in_every_look


@pytest.fixture
def own(worker: RecordingWorker) -> Iterator[OwnGateway]:
    with own_gateway(worker) as started:
        wait_until_up(started)
        yield started


def wait_until_up(own: OwnGateway) -> None:
    wait_for(lambda: all(worker.up and not worker.warming for worker in own.gateway.pool.workers))


def ask(own: OwnGateway, question: str, request_id: str, **fields) -> None:
    words = {"role": "system", "content": "You are a harbour pilot. " * 10}
    body = {"model": "m", "messages": [words, {"role": "user", "content": question}], **fields}
    httpx.post(own.url + CHAT, content=json.dumps(body), headers={"x-request-id": request_id}, timeout=300)


def text(page: Page, selector: str):
    return expect(page.locator(selector))


@contextlib.contextmanager
def busy(worker: RecordingWorker) -> Iterator[OwnGateway]:
    """Requests of every outcome, two under way and one in the queue; names as evil as clients can make them."""
    worker.models = ("m", EVIL_MODEL)
    with own_gateway(worker, max_inflight=2, excerpts=True) as own:
        wait_until_up(own)
        worker.cached = 0
        ask(own, "When is high water?", "first")
        worker.cached = 256
        for number in range(3):
            ask(own, f"When is low water on day {number}?", f"tide-{number}")
        worker.cached = 160
        ask(own, "And at Dover?", "too-little")
        worker.cached = 0
        ask(own, EVIL, EVIL, model=EVIL_MODEL)
        speech = {"role": "user", "content": "A long speech about ropes and knots. " * 20}
        for drink in ("tea", EVIL):
            messages = [{"role": "user", "content": f"We drink {drink}."}, {"role": "assistant", "content": "Aye."}]
            ask(own, "", f"about-{len(drink)}", messages=[*messages, speech])
        worker.status = 500
        ask(own, "Does it break?", "broken")
        worker.status = 200
        worker.hold.set()
        asking = [threading.Thread(target=ask, args=(own, "Wait", f"held-{number}")) for number in range(3)]
        for thread in asking:
            thread.start()
        try:
            wait_for(lambda: len(own.gateway.queue.waiting) == 1)
            yield own
        finally:
            worker.hold.clear()
            for thread in asking:
                thread.join()


def test_a_busy_gateway(browser, worker, in_every_look):
    with busy(worker) as own:

        def check(page: Page) -> None:
            text(page, "#load .big").to_have_text("2 under way")
            text(page, "#load").to_contain_text("1 waiting in the queue")
            text(page, "#now .big").to_contain_text("%")
            text(page, "#requests details").to_have_count(12)
            text(page, "#workers").to_contain_text(EVIL_MODEL)
            words = page.locator("#requests .why").all_text_contents()
            assert {"under way", "first sight", "hit", "failed with 500"} <= set(words)
            evil = page.locator("#requests details", has_text=EVIL_MODEL)
            evil.locator("summary").click()
            expect(evil.locator(".explanation")).to_contain_text(EVIL)
            expect(evil.locator(".explanation")).to_contain_text(EVIL_MODEL)
            changed = page.locator("#requests details", has_text="changed in the middle")
            expect(changed).to_have_count(1)
            changed.locator("summary").click()
            for words in ("Message 0 (user) differs, at character 9", "We drink tea.", f"We drink {EVIL}.", "It cost"):
                expect(changed.locator("dl:first-child")).to_contain_text(words)

        in_every_look(own, "busy", check)
        for width in (320, 600, 863, 959, 1920):  # nothing is cut off at any
            with opened(browser, own, Look(str(width), {"width": width, "height": 700}, "light")) as page:
                text(page, "#requests details").to_have_count(12)
                page.locator("#requests details", has_text=EVIL_MODEL).locator("summary").click()
                assert page.evaluate(TOO_WIDE) == []


def test_what_changing_text_costs_has_a_headline(worker, own, in_every_look):
    worker.cached = 0
    for day in (22, 23):
        words = {"role": "system", "content": f"Today is {date.today():%Y}-11-{day}. " + "You are a pilot. " * 60}
        ask(own, "", str(day), messages=[words, {"role": "user", "content": f"What of {day}?"}])
    httpx.get(f"{own.url}/seamark/requests/23").raise_for_status()
    found = httpx.get(f"{own.url}/seamark/live").json()["changing"]

    def check(page: Page) -> None:
        share = int(found["lost"] / found["common"] * 100)
        text(page, "#changing .big").to_have_text(f"{found['lost']:,} tokens, {share} %")
        text(page, "#changing").to_contain_text(f"of {found['common']:,} that prompts have in common")
        text(page, "#changing").to_contain_text(f"Mostly it is a date. {found['cure']}")
        text(page, "#now").to_contain_text(f"{found['lost']:,} more stood behind text that changed")
        text(page, "#state").to_have_text("1 warning")

    in_every_look(own, "changing", check)


def test_an_opened_row_speaks_in_its_readers_words_and_stays_open_while_others_come(browser, worker, own):
    for question in ("one", "two"):
        ask(own, question, question)
    told = httpx.get(f"{own.url}/seamark/requests/two").json()
    assert told["sent"] and told["lookup"] == "learnt"
    with opened(browser, own) as page:
        page.locator("#requests summary").first.click()
        row = page.locator("#requests details[open] .explanation")
        expect(row).to_contain_text("system prompt")
        expect(row).to_contain_text("the model's chat template")
        names = row.locator("dt").all_text_contents()
        assert {"Others can share up to", "That is known from", "vLLM was asked to keep"} <= set(names)
        said = row.text_content() or ""
        assert not re.search("(?i)hint|found by|strip|boundar|learnt|last:", said), said
        for number in range(13):
            ask(own, "three", f"r{number}")
        text(page, "#requests details:visible").to_have_count(13)  # others are folded, and it stays
        expect(row).to_contain_text("two")
        page.click("#more")
        text(page, "#requests details:visible").to_have_count(15)


def test_a_worker_that_is_down_and_answers_that_differ_cannot_be_overlooked(browser, worker, in_every_look):
    with contextlib.ExitStack() as other_runs:
        other = other_runs.enter_context(recording_worker())
        with own_gateway(worker, other, self_check_interval=60) as own:
            wait_until_up(own)
            ask(own, "one", "first")
            with opened(browser, own) as page:
                text(page, "#state").to_have_text("all is well")
                other_runs.close()  # while somebody looks
                text(page, "#alarms").to_contain_text("is down", timeout=PATIENCE)
            compared(own, 130, 2, True)

            def check(page: Page) -> None:
                for words in (f"Worker {other.url[7:]} is down", "Answers differ", "Hints are off"):
                    text(page, "#alarms").to_contain_text(words)
                text(page, "tr.down td.state").to_have_text("DOWN")
                text(page, "#state").to_have_text("2 alarms")
                text(page, "#check").to_have_text("Self-check: 130 answers compared, 2 differed · hints OFF")
                assert page.title().startswith("⚠") and is_red(page, "#alarms") and is_red(page, "tr.down")
                assert page.locator("#alarms").bounding_box()["y"] == 0

            in_every_look(own, "alarms", check)


def test_what_is_lost_in_shadow_has_a_card(in_every_look):
    with recording_worker(patched=False, cached=0) as worker, own_gateway(worker, shadow=True) as own:
        wait_until_up(own)
        for number in range(3):
            ask(own, f"When is low water on day {number}?", f"tide-{number}")
        wait_for(lambda: own.gateway.shadow.judged == 3)

        def check(page: Page) -> None:
            text(page, "#state").to_have_text("1 warning")
            text(page, "#warnings").to_contain_text("Shadow mode: nothing is changed")
            text(page, "#saved").to_be_hidden()
            text(page, "#lost h2").to_have_text("You would have saved")
            lost = own.gateway.shadow.would_save()
            assert lost["tokens"] > 0 and lost["prefill_seconds"] == 0
            share = int(lost["tokens"] / lost["computed_tokens"] * 100)
            text(page, "#lost .big").to_have_text(f"{lost['tokens']} tokens, {share} % of what was computed")
            lost_by_rows = page.locator("#requests .why", has_text="tokens lost")
            expect(lost_by_rows).to_have_count(2)
            assert sum(int(words.split()[0]) for words in lost_by_rows.all_text_contents()) == lost["tokens"]
            text(page, "#requests").not_to_contain_text("not reported")

        in_every_look(own, "shadow", check)


def test_a_gateway_that_ends_turns_the_page_red_and_its_figures_pale(browser, own, folder):
    with opened(browser, own, logged="ERR_CONNECTION_REFUSED") as page:
        text(page, "#day-none").to_contain_text(f"Give a client the base_url {own.url}/v1 ")
        own.stop()
        text(page, "#alarms").to_contain_text("The gateway does not answer", timeout=PATIENCE)
        pale = page.evaluate("getComputedStyle(document.getElementById('figures')).opacity")
        assert is_red(page, "#alarms") and pale == "0.45"
        page.screenshot(path=folder / "gateway-gone.png", full_page=True)


def test_time_saved_is_measured_first_and_then_credits_earlier_hits(browser, worker, own, in_every_look):
    ask(own, "one", "first")

    def check(page: Page) -> None:
        text(page, "#saved h2").to_have_text("Time saved beyond vLLM alone, at least")
        text(page, "#saved .big").to_have_text("measuring …")
        text(page, "#day-none").to_be_hidden()
        text(page, "#saved .since").to_contain_text("since")

    in_every_look(own, "measuring", check)
    with opened(browser, own) as page:
        worker.more_metrics = "seamark_pass_seconds 0.5\nseamark_token_seconds 25\n"
        worker.more_metrics += 'seamark_long_prefill_waits_seconds_total{threshold="1024"} 312\n'
        text(page, "#saved .big").to_have_text("1 h 6 min", timeout=PATIENCE)  # 160 tokens of before
        text(page, "#saved").to_contain_text("saved none, as by default it reuses only whole blocks of 384 tokens")
        text(page, "#workers").to_contain_text("12 s waited behind long prompts: --long-prefill-token-threshold 1024")
        worker.cached = 400
        ask(own, "A long question. " * 20, "second")
        text(page, "#saved .big").to_have_text("1 h 13 min", timeout=PATIENCE)
        text(page, "#saved").to_contain_text("Of 3 h 53 min saved, vLLM alone would have saved at most 2 h 40 min")
        own.gateway.accounting.time_saved().spent += 18_000
        text(page, "#saved .big").to_have_text("\u22123 h 46 min", timeout=PATIENCE)


def test_a_key_is_typed_into_the_page_and_kept_for_its_tab(browser, worker, keys, folder):
    with own_gateway(worker, api_keys=keys) as own:
        wait_until_up(own)
        with opened(browser, own, LOOKS[4], logged="status of 40") as page:
            text(page, "#key-why").to_have_text("This gateway requires an API key with admin = true.")
            for key, why in (("wrong", "not known"), (secret("ann"), "may not see")):
                page.fill("#key-text", key)
                page.click("#key button")
                text(page, "#key-why").to_contain_text(why)
            text(page, "#figures").to_be_hidden()
            page.screenshot(path=folder / "key.png")
            page.fill("#key-text", secret("root"))
            page.keyboard.press("Enter")
            text(page, "#figures").to_be_visible()
            text(page, "#key").to_be_hidden()
            text(page, "#keys").to_be_hidden()  # none has asked anything
            httpx.post(own.url + CHAT, json=chat("Tide?"), headers=bearer("ann"), timeout=30)
            text(page, "#keys td:first-child").to_have_text("ann", timeout=PATIENCE)
            text(page, "#keys tbody td:nth-child(2)").to_have_text("1")
            assert secret("root") not in page.url and page.input_value("#key-text") == ""
            page.reload()
            text(page, "#figures").to_be_visible()
            assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
            page.click("#forget")
            text(page, "#key").to_be_visible()
            text(page, "#figures").to_be_hidden()
            assert page.evaluate("sessionStorage.length") == 0
        assert httpx.get(own.url + "/seamark/live", headers=bearer("root")).status_code == 200


def test_the_policy_lets_nothing_run_but_the_pages_own_script(browser, own):
    context = browser.new_context()
    page = context.new_page()
    page.goto(own.url + "/ui")
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    with pytest.raises(Error, match=r"(?i)content security policy"):
        page.add_script_tag(content="window.broken = 1")
    for evil in ("<img src=/x onerror='window.broken = 1'>", "<p onclick='window.broken = 1' id=p>p</p>"):
        page.evaluate("(html) => document.body.insertAdjacentHTML('beforeend', html)", evil)
    page.evaluate("p.click()")
    with pytest.raises(Error, match="Failed to fetch"):
        page.evaluate(f"fetch('http://127.0.0.1:{free_port()}/')")
    assert page.evaluate("window.broken") is None
    assert len([line for line in refused if "Content Security Policy" in line]) >= 3
    context.close()
