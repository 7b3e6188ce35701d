"""What every page keeps to: it is read in any light and width, named, light, calm, and quick.
rules.py has the rules; judge() puts a page before all of them."""

import http.client
import os
import time

import pytest

from lab.page import reading, tools
from tests.lab.page.in_browser import rules
from tests.lab.page.in_browser.seen import shoot

COURSE = reading.Course()
CHAPTERS = [reading.address_of(name) for name in COURSE.sources if name[0].isdigit()]
PLAYED = [reading.address_of(name) for name in COURSE.sources if tools.plays(name)]
TOOLS = [f"{name}.html" for name in tools.TOOLS]
ALIKE = ("kernels-", "lab-", "text-")                   # one of each is enough, the longest
PAGES = [name for name in COURSE.site() if name.endswith(".html")
         and not name.startswith(ALIKE)] + [
    "kernels-fp8.html", "lab-checkpoints-checkpoint.html", "text-004.html"]

MOST = {"chapter": 300_000, "index.html": 400_000}      # bytes, of all that comes at opening
SHIFT, STOPS = 0.05, 150
SHOWN = 1.5                                             # seconds, on two cores
QUESTION, SEARCH = 0.150, 2.0                           # seconds

WIDE, NARROW = (1300, 900), (390, 800)
LOOKS = [(WIDE, "light"), (NARROW, "dark"), (WIDE, "dark"), (NARROW, "light")]


def looks(name):
    """How a page is opened: tools in two looks, the front page in all, and of the others, which are
    made alike, each in another one; FULL=1 opens all in all."""
    if os.environ.get("FULL") or name == "index.html":
        return LOOKS
    return LOOKS[:2] if name in TOOLS else [LOOKS[PAGES.index(name) % len(LOOKS)]]


# -------------------------------------------------------------------------------------- the judge

def look(page):
    """Whatever of the rules needs no more than a look, as lines."""
    found = [f"contrast {one['ratio']:.2f} of {one['text']!r}, {one['colors']}, at {one['where']}"
             for one in rules.pale(page)]
    found += [f"{one['text']!r} is {one['what']}, at {one['where']}"
              for one in rules.overlaps(page)]
    return found + [f"{one['what']}: {one['name']!r}, at {one['where']}"
                    for one in rules.unnamed(page)]


def moved(page, since=()):
    """Layout shifts that nobody asked for, and, if they are too much, so in a line. since: of those
    that were seen before."""
    seen = [one for one in rules.shifts(page) if not one["typed"]]
    new = seen[len(since):]
    total = sum(one["value"] for one in new)
    if total <= SHIFT:
        return seen, []
    most = max(new, key=lambda one: one["value"])
    return seen, [f"it shifts by {total:.2f}: {', '.join(most['where'])}"]


def judge(page, name):
    """All that is wrong with a page that was just opened, as lines."""
    found = look(page) + moved(page)[1]
    stops, weight = rules.tab_stops(page), rules.weight(page)
    kind = "chapter" if name in CHAPTERS else name
    if name in CHAPTERS and len(stops) > STOPS:
        found.append(f"Tab stops {len(stops)} times, most often at {max(stops, key=stops.count)}")
    if sum(weight.values()) > MOST.get(kind, float("inf")):
        found.append(f"{sum(weight.values()):,} bytes come: {list(weight.items())[:3]}")
    if rules.AXE.exists():
        found += [f"axe-core: {one['rule']} at {one['where']}"
                  for one in rules.axe(page, "color-contrast")]
    return found


class Quiet:
    """Knows when a page has been answered: nothing that it asked for is under way."""

    def __init__(self, page):
        self.page, self.asked = page, set()
        page.on("request", lambda request: self.asked.add(request))
        for over in ("requestfinished", "requestfailed"):
            page.on(over, lambda request: self.asked.discard(request))

    def wait(self, timeout=30):
        still, end = 0, time.monotonic() + timeout
        while still < 4 and time.monotonic() < end:     # 160 ms without a request
            self.page.wait_for_timeout(40)
            still = 0 if self.asked else still + 1


# ------------------------------------------------------------------------------------- every page

@pytest.mark.parametrize("name", PAGES)
def test_a_page_keeps_to_the_rules(open_page, name):
    found = []
    for size, scheme in looks(name):
        page = open_page(name, *size, color_scheme=scheme)
        page.wait_for_load_state("networkidle", timeout=60_000)
        found += [f"{size[0]} {scheme}: {one}" for one in judge(page, name)]
    assert not found, "\n".join(found)


# ------------------------------------------------------------------------------ tools, when used

def used(page, quiet, key):
    """Use each control of each tool of a page, one after another; yield what was done. A slider is
    moved by this key, and back."""
    for at, tool in enumerate(page.locator("[data-tool]").all()):
        for button in tool.locator(".buttons button").all():
            if button.is_visible() and button.is_enabled():
                name = button.inner_text()
                button.click()
                quiet.wait()
                yield f"{at} {name}"
        for control in tool.locator("form input[type=range]").all():
            if control.is_visible() and control.is_enabled():
                before = control.input_value()
                control.press(key)
                quiet.wait()
                yield f"{at} {control.get_attribute('name')} {key}"
                control.fill(before)
        for control in tool.locator("form select").all():
            if control.is_visible() and control.is_enabled():
                control.press("End")                    # a key, so that what moves is its doing
                quiet.wait()
                yield f"{at} {control.get_attribute('name')} {control.input_value()}"


def judge_used(page, name, key="End"):
    quiet, found = Quiet(page), {}                      # {line: after what it was seen first}
    quiet.wait()
    shifts, _ = moved(page)
    for done in used(page, quiet, key):
        shifts, lines = moved(page, since=shifts)
        found = {line: done for line in look(page) + lines} | found
    shoot(page, f"{name.removesuffix('.html')}-used")
    return [f"after {done}: {line}" for line, done in found.items()]


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_keeps_to_them_when_it_is_used(open_page, name):
    found = []
    for (size, scheme), key in zip(LOOKS[:2], ("End", "Home"), strict=True):
        page = open_page(name, *size, color_scheme=scheme)
        page.wait_for_load_state("networkidle", timeout=60_000)
        found += [f"{size[0]} {scheme}: {one}" for one in judge_used(page, name, key)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", PLAYED)
def test_a_tool_in_a_lesson_keeps_to_them_when_it_is_used(open_page, name):
    page = open_page(name, *WIDE, color_scheme="dark")
    page.wait_for_load_state("networkidle", timeout=60_000)
    assert not (found := judge_used(page, name)), "\n".join(found)


@pytest.mark.parametrize("name", TOOLS)
def test_a_bad_link_is_told_and_can_be_read(open_page, name):
    """Each of these names is one that some tool knows."""
    page = open_page(f"{name}#ranks=0&rank=-1&gpus=0&model=foo&hop=-1&chips=0&billions=0",
                     *NARROW)
    page.locator(".problem").wait_for()
    Quiet(page).wait()
    assert len(page.inner_text(".problem").splitlines()) == 1
    assert "--" not in page.inner_text(".problem"), "it speaks of a terminal's flag"
    assert not (found := look(page)), "\n".join(found)


@pytest.mark.parametrize("name", TOOLS + PLAYED[:1])
def test_nothing_is_animated_for_who_does_not_want_it(open_page, name):
    page = open_page(name, reduced_motion="reduce")
    page.wait_for_load_state("networkidle", timeout=60_000)
    for tool in page.locator("[data-tool]").all():
        play, seen = tool.locator("button.run"), set()
        if play.count():
            play.click()
            for _ in range(20):                         # five seconds
                assert not rules.moving(page)
                seen.add(tool.locator(".results").evaluate("one => one.outerHTML"))
                if len(seen) > 2:
                    break
                page.wait_for_timeout(250)
            assert len(seen) > 2, "it does not play"
    assert not rules.moving(page)


# --------------------------------------------------------------------------------------- how quick

def slowness():
    """How many times as long as alone this machine takes now: of a loop, seconds of the clock for
    one of a processor. What takes time is held to its limit times this."""
    begin, used = time.monotonic(), time.process_time()
    sum(range(3_000_000))
    return max(1.0, (time.monotonic() - begin) / (time.process_time() - used))


def seconds_of(measure, limit, times=3):
    """The least of several measurements, each by how slow the machine was; the first within its
    limit is the last."""
    found = []
    while len(found) < times and min(found, default=limit) >= limit:
        before = slowness()
        found.append(measure() / max(before, slowness()))
    return min(found)


@pytest.mark.parametrize("name", ["index.html", *CHAPTERS])
def test_a_page_is_shown_soon(open_page, name):
    def measure():
        page = open_page(name)
        page.wait_for_load_state("load")
        while not (told := rules.timings(page))["painted"]:
            page.wait_for_timeout(20)
        return max(told["painted"], told["complete"]) / 1000

    assert seconds_of(measure, SHOWN) < SHOWN


def answered(address, question):
    """Seconds until it is."""
    host = address.removeprefix("http://").strip("/")
    connection, begin = http.client.HTTPConnection(host), time.monotonic()
    connection.request("GET", f"/api/{question}", headers={"Host": host})
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200, question
    return time.monotonic() - begin


def test_a_layout_is_answered_at_once(address):
    """95 of 100 of them, none of which was asked before."""
    layouts = [f"plan?model={model}&cluster=h100&gpus={gpus}&tp={tp}&pp={pp}&zero={zero}"
               for model in ("8b", "70b") for gpus in (256, 512, 1024) for tp in (1, 2, 8)
               for pp in (1, 2) for zero in (1, 3)]
    before = slowness()
    found = sorted(answered(address, layout) for layout in layouts)
    late = found[int(0.95 * len(found))] / max(before, slowness())
    assert late < QUESTION, found


@pytest.mark.parametrize("model", ["8b", "70b", "405b"])
def test_a_search_is_answered_soon(address, model):
    several = iter((640, 1280, 1792))                   # of GPUs: an answer may be kept
    assert seconds_of(lambda: answered(
        address, f"best?model={model}&cluster=h100&gpus={next(several)}"), SEARCH) < SEARCH
