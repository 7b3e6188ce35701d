"""A real Chromium without a screen. Without Chromium or Playwright, the tests are skipped.

Afterwards runs/page/ has screenshots of what it showed.
"""

import os
import shutil
import threading

import pytest

QUIET = ["--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]
REFUSED = "status of 400 (Bad Request)"  # a browser's words for a question that is refused
# How many answers the tools wait for: see seen.settled.
BUSY = """window.busy = 0;
addEventListener("DOMContentLoaded", () => {
    if (typeof Mount === "undefined") return;
    const latest = Mount.prototype.latest;
    Mount.prototype.latest = function (answer) {
        const update = latest.call(this, answer);
        return async () => {
            window.busy++;
            await update();
            window.busy--;
        };
    };
});"""


@pytest.fixture(scope="session")
def address(tmp_path_factory):
    from lab.site import answers, reading, server

    with server.Server(0, lambda: reading.Course(tmp_path_factory.mktemp("runs"))) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        answers.warm_up()
        yield one.address
        one.shutdown()


@pytest.fixture(scope="session")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright to drive a browser")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser",
                                                   "google-chrome"))), None)
    if not program:
        pytest.skip("there is no Chromium here; apt install chromium would bring one")
    arguments = QUIET + ["--no-sandbox"] * (os.getuid() == 0)  # root has no sandbox
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments,
                                             timeout=180_000)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, address):
    """open_page("rings.html", width=..., ...): the page. It fails if any page that it opened said
    something in the console, had an error, or asked anybody but `at`, its own server or folder."""
    contexts, wrong = [], []

    def open_one(name, width=1300, height=900, at=address, blocked=None, **more):
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, **more))
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)
        page.add_init_script(BUSY)
        if blocked:
            page.route(blocked, lambda route: route.abort())
        known = (REFUSED, "net::ERR_FAILED") if blocked else (REFUSED,)
        page.on("console", lambda said: wrong.append((name, said.text))
                if not any(one in said.text for one in known) else None)
        page.on("pageerror", lambda error: wrong.append((name, str(error))))
        page.on("request", lambda asked: wrong.append(asked.url)
                if not asked.url.startswith((at, "blob:")) else None)
        page.goto(at + name)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not wrong
