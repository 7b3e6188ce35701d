"""The site as files, opened from a folder and from a server of files.

With Python in the browser it answers as our server does. Without, sliders stop at what is stored.
"""

import functools
import http.server
import json
import threading

import pytest

from lab.site import tools
from tests.lab.site.in_browser.seen import asked, move, settled, shoot, sliders

pytestmark = pytest.mark.full
LIMIT = 300_000  # milliseconds, for Python on a busy machine


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@pytest.fixture(scope="session")
def stored():
    from lab.site import export, plans

    plans.SECONDS = 600  # of a search
    return export.stored_answers()


@pytest.fixture(scope="session")
def sites(tmp_path_factory, stored):
    """{whether it has Python: the folder of the site}."""
    from lab.site import export, reading

    runtime, why = export.pyodide(export.ARCHIVE)
    found = {}
    for has_python in (True, False):
        found[has_python] = tmp_path_factory.mktemp("site")
        export.write_with(found[has_python], reading.Course(computes=False), stored,
                          runtime if has_python else None)
    return found | {"why": why}


@pytest.fixture(scope="session")
def served(sites):
    """The address of a plain server of the files that have Python."""
    handler = functools.partial(Quiet, directory=sites[True])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_port}/"
        one.shutdown()


@pytest.fixture
def open_files(open_page, served, sites):
    """open_files(at, name): the page, "without" Python, or with it in a "folder" or on a "server".
    The test is skipped if it needs Python and `make site` has fetched none."""
    addresses = {"folder": f"file://{sites[True]}/", "server": served,
                 "without": f"file://{sites[False]}/"}

    def open_one(at, name, **more):
        if at != "without" and sites["why"]:
            pytest.skip(sites["why"])
        page = open_page(name, at=addresses[at], **more)
        page.set_default_timeout(LIMIT)
        return page

    return open_one


# ----------------------------------------------------------------------------------------- sliders


@pytest.mark.parametrize("at", ["folder", "server", "without"])
@pytest.mark.parametrize("tool", tools.TOOLS)
def test_each_slider_is_answered(open_files, tool, at):
    page = open_files(at, f"{tool}.html")
    before, seen = settled(page), set()
    for name in sliders(page):
        was = move(page, name)
        seen.add(settled(page))
        assert page.locator(".problem").is_hidden(), (name, page.inner_text(".problem"))
        move(page, name, was)
    assert seen - {before}
    shoot(page, f"files-{at}-{tool}")


def test_python_that_cannot_be_loaded_is_told_and_asked_for_again(open_files):
    blocked = "**/python/python.js"
    page = open_files("server", "schedules.html", blocked=blocked)
    before = settled(page)
    move(page, "F")
    assert "python/python.js" in page.inner_text(".problem") and settled(page) == before
    page.unroute(blocked)
    move(page, "F")
    assert page.locator(".problem").is_hidden() and "F=1.2" in page.url


# ----------------------------------------------------------------------------------------- answers

ASKED = ["plan?model=qwen3-235b&gpus=512&ep=32", "best?model=8b&gpus=24&batch=96&cluster=a100",
         "schedule?schedule=dualpipe&ranks=6&micro_batches=20&F=1.3",
         "roofline?cluster=h200&chips=48&strategy=both", "memory?billions=2.5&ranks=77"]


def alike(one, other):
    """From Python 3.12 on, sum() rounds differently: the last digits differ."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == (pytest.approx(other, rel=1e-12) if isinstance(other, float) else other)


def answer(page, query):
    return page.evaluate("""async query => {
        try { return await ask(query, null, () => null); } catch (error) { return error.message; }
    }""", query)


@pytest.mark.parametrize("at", ["folder", "server"])
def test_python_in_the_browser_answers_as_the_server_does(open_files, address, at):
    page = open_files(at, "schedules.html")
    for query in ASKED:
        assert alike(answer(page, query), asked(address, query)), query
    assert "none" in answer(page, "plan?model=70b&gpus=none")


def test_what_is_stored_is_unpacked_in_the_browser(open_files, stored):
    page = open_files("without", "planner.html")
    settled(page)
    for lines in stored.values():
        for query in (list(lines)[0], list(lines)[len(lines) // 2], list(lines)[-1]):
            assert page.evaluate("isAnswered", query)
            told = json.loads(json.dumps(lines[query]))
            assert answer(page, query) == told.get("error", told), query
    assert not page.evaluate("isAnswered", "ring?ranks=4&cut=none")
    assert "make page" in answer(page, "ring?ranks=4&cut=none")
