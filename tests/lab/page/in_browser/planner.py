"""The tool of planner, on its page and in lesson 10."""

import threading

import pytest

from lab.page import plans, tools
from tests.lab.page.in_browser.seen import asked, shoot, verdict, widths

QUESTION = "model=70b&cluster=h100&gpus=512&batch=2048&software=megatron-2024"
FASTEST = "The fastest of"              # what its status says when a search has ended


def move(page, name, key, times=1):
    page.locator(f"input[name={name}]").focus()
    for _ in range(times):
        page.keyboard.press(key)


def values(page):
    """{name: what a control shows}."""
    return dict(page.eval_on_selector_all(
        ".controls label:has([name])", "all => all.map(one => ["
        "one.querySelector('[name]').name, one.querySelector('input[type=number]')?.value ?? "
        "one.querySelector('output')?.textContent ?? one.querySelector('select').value])"))


def test_sliders_change_the_bars_to_what_the_planner_says(open_page, address):
    page = open_page("planner.html#model=70b&cluster=h100&gpus=512")
    verdict(page, FASTEST, ".status")
    best = asked(address, f"best?{QUESTION}")
    assert best["plans"][0]["words"] in page.inner_text(".verdict")
    rows = page.locator(".plans tr").all_inner_texts()
    for plan, row in zip(best["plans"], rows[1:], strict=True):
        assert row.startswith(plan["words"])

    for slider, key, words in (("tp", "ArrowRight", "tp 8"), ("zero", "ArrowLeft", "zero 1")):
        move(page, slider, key)
        verdict(page, words)
    layout = dict(pair.split("=") for pair in page.url.split("#")[1].split("&"))
    assert layout["tp"] == "8" and layout["zero"] == "1"
    layout.pop("seq")                                   # the model's own
    plan = asked(address, "plan?" + "&".join(f"{key}={value}" for key, value in layout.items()))
    assert f"{plan['seconds']:.1f} s a step" in page.inner_text(".verdict")
    across = max(plan["capacity"] * 1.02, plan["bytes"])
    for bar, parts, most in ((".memory", plan["memory"], across),
                             (".seconds", plan["time"], plan["seconds"])):
        drawn = widths(page, bar)
        for cause, value in parts.items():
            assert drawn[cause] == pytest.approx(900 * value / most, abs=1e-6)
    verdict(page, f"The fastest that fits takes {best['plans'][0]['seconds']:.1f} s", ".status")
    shoot(page, "planner-changed")

    again = open_page("planner.html" + "#" + page.url.split("#")[1])     # a link holds all of it
    verdict(again, f"{plan['seconds']:.1f} s a step")
    assert widths(again, ".seconds") == widths(page, ".seconds")
    page.locator(".plans button").nth(3).click()
    verdict(page, best["plans"][3]["words"])
    page.locator(".take-best").click()
    verdict(page, best["plans"][0]["words"])
    move(page, "master_bytes", "ArrowLeft")             # 2 bytes in place of 4
    verdict(page, "--master-bytes=2", ".command")
    assert "master_bytes=2" in page.url and "&tp=" not in page.url


def test_degrees_that_a_link_has_are_kept_and_the_others_are_searched(open_page, address):
    page = open_page("planner.html#model=70b&gpus=512&tp=8")
    verdict(page, FASTEST, ".status")
    best = asked(address, f"best?{QUESTION}&tp=8")["plans"][0]
    assert best["words"] in page.inner_text(".verdict") and best["layout"]["tp"] == 8
    assert "with tp 8, which you gave" in page.inner_text(".status")
    assert page.url.endswith("&tp=8")                   # what is given, and no more
    shown = values(page)
    for name in ("tp", "cp", "pp", "v", "ep", "zero", "micro_batch", "recompute", "schedule"):
        assert shown[name] == str(best["layout"][name]), name
    for name in ("tp", "cp", "pp", "zero", "micro_batch"):
        assert page.locator(f"input[name={name}]").is_enabled(), name
    page.goto(f"{address}planner.html#model=70b&gpus=512&pp=4")
    verdict(page, "with pp 4, which you gave", ".status")
    assert values(page)["pp"] == "4" and "✓ fits" in page.inner_text(".verdict")
    page.goto(f"{address}planner.html#model=70b&gpus=512")
    verdict(page, "layouts that fit.", ".status")
    before = values(page)
    move(page, "pp", "ArrowRight")                      # whose slices no longer divide a stage
    verdict(page, "You gave all degrees", ".status")
    assert "✓ fits" in page.inner_text(".verdict") and values(page)["pp"] != before["pp"]


def test_a_drag_is_one_search_and_back_goes_to_before_it(open_page):
    page = open_page("planner.html")
    verdict(page, FASTEST, ".status")
    first, searches = page.url, []
    page.wait_for_timeout(800)                          # it was stayed at
    page.on("request", lambda one: searches.append(one.url) if "/best?" in one.url else None)
    move(page, "gpus", "ArrowLeft", times=3)
    verdict(page, "--gpus=64", ".command")
    verdict(page, FASTEST, ".status")
    assert len(searches) <= 2 and "gpus=64" in searches[-1]
    told = page.inner_text(".verdict")
    page.go_back()
    verdict(page, "--gpus=512", ".command")
    assert page.url == first and values(page)["gpus"] == "512"
    page.go_forward()
    verdict(page, "--gpus=64", ".command")
    verdict(page, told)


def test_a_layout_is_answered_before_the_search(open_page):
    """And the search that nobody waits for any more ends."""
    page = open_page("planner.html#model=70b&gpus=512")
    verdict(page, FASTEST, ".status")
    held = threading.Event()
    page.route("**/best?**", lambda route: (held.wait(1), route.continue_()))
    before = page.inner_text(".verdict")
    move(page, "batch", "ArrowLeft")
    verdict(page, "the one from before", ".status")
    assert page.inner_text(".verdict") != before and "✓ fits" in page.inner_text(".verdict")
    held.set()
    verdict(page, FASTEST, ".status")

    page.unroute("**/best?**")
    page.locator("select[name=model]").select_option("qwen3-235b")
    page.wait_for_timeout(600)                          # it searches
    page.locator("select[name=model]").select_option("1b")
    verdict(page, FASTEST, ".status")
    assert plans.SEARCHES.acquire(timeout=5) and plans.SEARCHES.acquire(timeout=5)
    plans.SEARCHES.release(2)


def test_what_does_not_fit_is_said_with_a_change_that_works(open_page):
    page = open_page("planner.html#model=405b&gpus=8")
    verdict(page, "✗ needs")
    page.locator(".problem").wait_for()
    shoot(page, "planner-no-fit")
    page.get_by_role("button", name="more GPUs: 128").click()
    verdict(page, "✓ fits")
    verdict(page, FASTEST, ".status")
    assert not page.locator(".problem").is_visible() and "gpus=128" in page.url

    page = open_page("planner.html#model=70b&gpus=64")
    verdict(page, FASTEST, ".status")
    move(page, "pp", "Home")                            # 1: it no longer fits
    verdict(page, "✗ needs")
    change = page.locator(".offers button", has_text="with zero 3")
    change.wait_for()
    assert page.locator(".offers button", has_text="the fastest that fits").count() == 1
    change.click()
    verdict(page, "✓ fits")
    body = page.inner_text("main").replace(page.inner_text(".command"), "")
    assert "--" not in body


@pytest.mark.parametrize(("link", "said", "shown"), [
    ("gpus=0", "gpus = 0 is no whole number from 1 on: here it is 512", "gpus=512"),
    ("model=foo", "model = foo is none of 1b,", "model=70b"),
    ("cluster=foo", "cluster = foo is none of a100,", "cluster=h100"),
    ("gpus=20000000", "gpus = 20000000 is more than 16777215: here it is 512", "gpus=512"),
    ("zero=7", "zero = 7 is more than 3: it is left out", "gpus=512"),
    ("tp=x", "tp = x is no whole number from 1 on: it is left out", "gpus=512"),
    ("colour=red", "there is no colour to choose", "gpus=512")])
def test_a_link_that_is_wrong_is_told(open_page, link, said, shown):
    page = open_page(f"planner.html#{link}")
    verdict(page, said, ".problem")
    verdict(page, "✓ fits")
    assert shown in page.url and link not in page.url


def test_a_search_that_fails_is_told(open_page):
    page = open_page("planner.html#gpus=8")
    verdict(page, "✗ needs")
    page.route("**/best?**", lambda route: route.fulfill(
        status=400, content_type="application/json", body='{"error": "the search took more"}'))
    page.locator("select[name=model]").select_option("1b")
    verdict(page, "the search took more", ".problem")
    assert "searching" not in page.inner_text(".told")


def test_a_map_is_filled_whatever_became_of_the_question(open_page):
    page = open_page("planner.html", height=600)
    verdict(page, FASTEST, ".status")
    page.route("**/best?**", lambda route: route.fulfill(
        status=400, content_type="application/json", body='{"error": "the search took more"}'))
    move(page, "gpus", "ArrowLeft")
    verdict(page, "the search took more", ".problem")
    assert not page.locator(".tool.waits").count()
    page.locator(".map").scroll_into_view_if_needed()
    page.locator(".map button", has_text="no").nth(19).wait_for()


def test_an_empty_field_keeps_its_number_and_no_heading_is_empty(open_page):
    page = open_page("planner.html#gpus=513")
    verdict(page, "✗")
    page.locator(".offers button").first.wait_for()
    headings = page.locator(".results h2:visible").all_inner_texts()
    assert not [one for one in headings if one.startswith(("Memory", "Seconds", "What would"))]
    field = page.locator("input[name=gpus_number]")
    field.fill("")
    field.blur()
    assert field.input_value() == "513" and "gpus = 0" not in page.inner_text(".told")
    field.fill("512")
    field.blur()
    verdict(page, FASTEST, ".status")
    assert len(page.locator(".results h2:visible").all()) == len(headings) + 3


def test_a_server_that_is_gone_is_told(open_page):
    page = open_page("planner.html")
    verdict(page, FASTEST, ".status")
    page.evaluate("() => { fetch = () => Promise.reject(new TypeError('Failed to fetch')); }")
    move(page, "gpus", "ArrowLeft")
    verdict(page, "the server of this page does not answer; `make page` starts it", ".problem")


@pytest.mark.parametrize("name", ["schedules", "cuts", "rings", "memory", "collectives"])
def test_a_name_that_a_link_has_in_vain_is_told(open_page, name):
    page = open_page(f"{name}.html#foo=1")
    verdict(page, "there is no foo to choose: it is left out", ".problem")
    assert "foo" not in page.url and not page.locator(".refused").count()


def test_an_edited_link_that_is_refused_is_told_as_a_new_one(open_page, address):
    page = open_page("cuts.html")
    verdict(page, " ")
    page.goto(f"{address}cuts.html#tp=7")
    verdict(page, "of tp = 7", ".problem")
    page.wait_for_url("**tp=2**")
    assert not page.locator(".refused").count()


def test_a_map_of_layouts_is_filled_when_it_is_seen(open_page):
    page = open_page("planner.html", height=600)
    verdict(page, FASTEST, ".status")
    assert page.locator(".map button", has_text="…").count() == 20
    page.locator(".map").scroll_into_view_if_needed()
    page.locator(".map button", has_text="%").first.click(timeout=60_000)
    page.wait_for_url("**model=1b**")
    verdict(page, FASTEST, ".status")


@pytest.mark.parametrize(("width", "most"), [(1300, 0.05), (390, 0.05)])
def test_room_is_kept_for_what_comes(open_page, width, most):
    page = open_page("planner.html", width=width)
    verdict(page, FASTEST, ".status")
    shift = page.evaluate("""() => new Promise(done => {
        let total = 0;
        new PerformanceObserver(list => list.getEntries().forEach(one => { total += one.value; }))
            .observe({ type: "layout-shift", buffered: true });
        setTimeout(() => done(total), 200); })""")
    assert shift <= most


@pytest.mark.parametrize("name", [name for name in tools.TOOLS if 'class="verdict"' in
                                  (tools.FILES / f"{name}.html").read_text()])
def test_on_a_phone_the_verdict_stays_in_sight_above_the_controls(open_page, name):
    page = open_page(f"{name}.html", width=390, height=844)
    verdict(page, " ")                                  # it has words
    last = page.locator(".tool .controls").last
    last.evaluate("one => scrollTo(0, scrollY + one.getBoundingClientRect().bottom - 700)")
    page.wait_for_timeout(200)
    box = page.locator(".verdict").bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] < last.bounding_box()["y"] + (
        last.bounding_box()["height"]) and box["height"] < 380
    shoot(page, f"{name}-phone")


def test_lesson_10_plays_it(open_page, address):
    """It brings its first answers along."""
    questions = []
    page = open_page("10_planner.html")
    page.on("request", lambda one: questions.append(one.url))
    verdict(page, FASTEST, ".status")
    best = asked(address, f"best?{QUESTION}")["plans"]
    assert best[0]["words"] in page.inner_text(".verdict")
    assert page.locator(".plans tr").count() == 6 and not [one for one in questions if "api" in one]
    page.locator("[data-tool]").scroll_into_view_if_needed()
    shoot(page, "10-planner")
    move(page, "gpus", "ArrowLeft")
    verdict(page, "of a GPU")
    page.wait_for_timeout(400)
    verdict(page, FASTEST, ".status")
    assert "#" not in page.url and questions
