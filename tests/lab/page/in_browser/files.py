"""The site as files, opened from a folder and from a server of files: it answers whatever a slider
asks. With Python in the browser, its answers are the server's; without, sliders are bounded."""

import functools
import http.server
import json
import re
import threading

import pytest

from lab.page import export, reading, tools
from tests.lab.page.in_browser.seen import asked, shoot

WAITS = re.compile("…|is loading|Python computes")      # what a tool says while it waits
LIMIT = 120                                             # seconds, for Python on a busy machine


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@pytest.fixture(scope="session")
def stored():
    return export.stored_answers()


@pytest.fixture(scope="session")
def sites(tmp_path_factory, stored):
    """{whether it has Python: the folder of the site}."""
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
def with_python(sites):
    if sites["why"]:
        pytest.skip(sites["why"])


@pytest.fixture
def open_files(chromium, served, sites):
    """open_files(at, name): the page, at "folder", "server", or "without" Python, in a folder; in
    the end, nothing was wrong in any, and nobody else was asked for anything."""
    contexts, wrong = [], []
    addresses = {"folder": f"file://{sites[True]}/", "server": served,
                 "without": f"file://{sites[False]}/"}

    def open_one(at, name, blocked=None):
        contexts.append(chromium.new_context(viewport={"width": 1300, "height": 900}))
        page = contexts[-1].new_page()
        if blocked:
            page.route(blocked, lambda route: route.abort())
        page.on("console", lambda said: wrong.append((at, name, said.text))
                if not (blocked and "net::ERR_FAILED" in said.text) else None)
        page.on("pageerror", lambda error: wrong.append((at, name, str(error))))
        page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(
            (addresses[at], "blob:")) else None)
        page.goto(addresses[at] + name)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not wrong


# ---------------------------------------------------------------------------------------- sliders

def settled(page):
    """Wait until the tool has answered: what it says."""
    for _ in range(10 * LIMIT):
        page.wait_for_timeout(100)
        said = " ".join(page.locator(".verdict, .status").all_inner_texts())
        if not WAITS.search(said) and not page.locator(".tool.waits").count():
            return said
    raise AssertionError(f"it waits for ever: {said}")


def sliders(page):
    """The names of all that can be moved, and is seen."""
    return page.eval_on_selector_all(
        "[data-tool] input[type=range]", "all => all.filter(one => !one.disabled && "
        "one.checkVisibility() && one.max > 0).map(one => one.name)")


def move(page, name, back=False):
    """To the next value, or, at the last one, to the one before; or back, to where it was."""
    page.eval_on_selector(f"[data-tool] input[name={name}]", """(one, back) => {
        const was = one.value;
        one.value = back ? one.dataset.was : Number(was) + (was === one.max ? -1 : 1);
        one.dataset.was = was;
        one.dispatchEvent(new Event("input", { bubbles: true }));
        one.dispatchEvent(new Event("change", { bubbles: true }));
    }""", back)


def moves_all(page):
    """Move each slider once, and back. {name: what the tool says before and after}."""
    found, before = {}, settled(page)
    for name in sliders(page):
        move(page, name)
        after = settled(page)
        problem = page.locator(".problem")
        assert not problem.is_visible(), (name, problem.inner_text())
        assert "undefined" not in after and "NaN" not in after
        found[name] = before, after
        move(page, name, back=True)
        before = settled(page)
    return found


@pytest.mark.parametrize("at", ["folder", "server"])
@pytest.mark.parametrize("tool", tools.TOOLS)
def test_each_slider_is_answered(open_files, with_python, tool, at):
    page = open_files(at, f"{tool}.html")
    said = moves_all(page)
    assert said and any(before != after for before, after in said.values())
    if at == "folder":
        shoot(page, f"files-{tool}")


@pytest.mark.parametrize("tool", tools.TOOLS)
def test_without_python_sliders_are_bounded_to_what_is_stored(open_files, tool):
    assert moves_all(open_files("without", f"{tool}.html"))


def test_python_that_cannot_be_loaded_is_told_and_asked_for_again(open_files, with_python):
    blocked = "**/python/python.js"
    page = open_files("server", "schedules.html", blocked)
    before = settled(page)
    move(page, "F")
    page.locator(".problem", has_text="python/python.js could not be loaded").wait_for()
    assert settled(page) == before
    page.unroute(blocked)
    move(page, "F")
    page.locator(".problem").wait_for(state="hidden", timeout=1000 * LIMIT)
    assert "is loading" not in settled(page) and "F=1.2" in page.url


def test_a_lesson_plays_from_a_folder(open_files):
    page = open_files("folder", "06_context_parallel.html")
    before = page.inner_text("[data-tool=rings] .verdict")
    move(page, "ranks")
    page.wait_for_function("before => document.querySelector('[data-tool=rings] .verdict')"
                           ".innerText !== before", arg=before)
    assert not page.locator("[data-tool=rings] .problem").is_visible()


# ----------------------------------------------------------------------------------------- answers

ASKED = ["plan?model=70b&gpus=512&tp=4&pp=2&batch=512", "plan?model=qwen3-235b&gpus=512&ep=32",
         "best?model=8b&gpus=24&batch=96&cluster=a100", "best?model=405b&gpus=8&batch=512",
         "schedule?schedule=dualpipe&ranks=6&micro_batches=20&F=1.3",
         "roofline?cluster=h200&chips=48&strategy=both", "memory?billions=2.5&ranks=77",
         "plan?model=70b&gpus=none"]


def alike(one, other):
    """Python 3.12 and later add floats up in another way: the last digits differ."""
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
def test_python_in_the_browser_answers_as_the_server_does(open_files, with_python, address, at):
    page = open_files(at, "schedules.html")
    page.set_default_timeout(1000 * LIMIT)
    for query in ASKED:
        if query.endswith("none"):
            assert "none" in answer(page, query)
        else:
            assert alike(answer(page, query), asked(address, query)), query


def test_what_is_stored_is_unpacked_in_the_browser(open_files, stored):
    page = open_files("without", "planner.html")
    for lines in stored.values():
        for query in (list(lines)[0], list(lines)[len(lines) // 2], list(lines)[-1]):
            assert page.evaluate("isAnswered", query)
            told = json.loads(json.dumps(lines[query]))
            assert answer(page, query) == told.get("error", told), query
    assert not page.evaluate("isAnswered", "ring?ranks=4&cut=none")
    assert "these pages are files" in answer(page, "ring?ranks=4&cut=none")


def test_an_old_question_is_not_asked_and_python_can_begin_anew(open_files, with_python):
    page = open_files("folder", "schedules.html")
    page.set_default_timeout(1000 * LIMIT)
    told = page.evaluate("""async () => {
        const said = [], first = ask("schedule?ranks=3", null, words => said.push(words));
        const old = new AbortController(), asked = ask("schedule?ranks=5", old.signal, () => null);
        old.abort(new Error("gone"));
        const newest = ask("schedule?ranks=6", null, () => null);
        const ends = await Promise.allSettled([first, asked, newest]);
        return [said, ends.map(end => end.reason?.message ?? end.value.actions.length)];
    }""")
    assert told[1] == [3, "gone", 6] and "MB, once" in told[0][0]
    page.evaluate("endPython()")                        # as after a question that takes too long
    assert len(answer(page, "schedule?ranks=7")["actions"]) == 7


def test_a_question_that_nobody_waits_for_is_ended(open_files, with_python):
    page = open_files("folder", "schedules.html")
    page.set_default_timeout(1000 * LIMIT)
    answer(page, "schedule?ranks=3")                    # Python has begun
    told = page.evaluate("""async () => {
        const old = new AbortController(), was = python;
        python.postMessage = () => null;                // it computes for ever
        const long = ask("schedule?ranks=5", old.signal, () => null);
        setTimeout(() => old.abort(new Error("gone")), 100);
        const ends = [await long.catch(error => error.message), python === was];
        return [...ends, (await ask("schedule?ranks=6", null, () => null)).actions.length];
    }""")
    assert told == ["gone", False, 6]


def test_size(sites):
    """What GitHub Pages is to serve, Python apart."""
    size = sum(path.stat().st_size for path in sites[False].rglob("*") if path.is_file())
    assert size < 12e6
