"""A real Chromium, without a screen, for `make test-page`. Skipped where there is none.

Screenshots of what it saw lie in runs/page/ afterwards, to be looked at.
"""

import os
import shutil
import threading

import pytest

from lab.page import answers, reading, server

QUIET = ["--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]
REFUSED = "status of 400 (Bad Request)"                 # what a browser says of a refused question


@pytest.fixture(scope="session")
def address(tmp_path_factory):
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
    arguments = QUIET + (["--no-sandbox"] if os.getuid() == 0 else [])      # which root has none of
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, address):
    """open_page("rings.html", width=..., ...): the page; in the end, nothing was wrong in any."""
    contexts, wrong = [], []

    def open_one(name, width=1300, height=900, **more):
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, **more))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: wrong.append((name, said.text))
                if REFUSED not in said.text else None)
        page.on("pageerror", lambda error: wrong.append((name, str(error))))
        page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(
            (address, "file:")) else None)
        page.goto(name if name.startswith("file:") else address + name)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not wrong
