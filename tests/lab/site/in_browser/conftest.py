"""A real Chromium without a screen. Without Chromium or Playwright, the tests are skipped.

Afterwards runs/page/ has screenshots of what it showed.
"""

import os
import shutil

import pytest

from lab.site import build, pages

QUIET = ["--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]
LIMIT = 300_000  # milliseconds, for Python in a browser on a busy machine
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
def stored():
    return build.stored_answers()


@pytest.fixture(scope="session")
def address(tmp_path_factory, stored):
    """The whole site, with Python if `make site` has fetched one, in a folder."""
    folder = tmp_path_factory.mktemp("site")
    runtime, _ = build.read_pyodide(build.ARCHIVE)
    build.write_with(folder, pages.Site().files(), stored, runtime)
    return f"file://{folder}/"


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
def open_page(chromium, request):
    """open_page("rings.html", width=..., at=...): the page, of the whole site or of a folder. It
    fails if any page that it opened wrote to the console, had an error, or loaded anything from
    elsewhere."""
    contexts, wrong = [], []

    def open_one(name, width=1300, height=900, at=None, **more):
        at = at or request.getfixturevalue("address")
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, **more))
        page = contexts[-1].new_page()
        page.set_default_timeout(LIMIT)
        page.add_init_script(BUSY)
        page.on("console", lambda line: wrong.append((name, line.text)))
        page.on("pageerror", lambda error: wrong.append((name, str(error))))
        page.on("request", lambda asked: None if asked.url.startswith((at, "blob:"))
                else wrong.append(asked.url))
        page.goto(at + name)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not wrong
