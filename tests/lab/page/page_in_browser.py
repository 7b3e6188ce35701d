"""The page in a real Chromium, without a screen: `make test-page`. Skipped where there is none.

Screenshots of what it saw lie in runs/page/ afterwards, to be looked at.
"""

import json
import os
import shutil
import threading
import time
import urllib.request

import pytest

from lab.page import answers, reading, server
from tests.conftest import ROOT

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright to drive a browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)
if not CHROMIUM:
    pytest.skip("there is no Chromium here; apt install chromium would bring one",
                allow_module_level=True)
SHOTS = ROOT / "runs/page"
QUIET = ["--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with server.Server(0, lambda: reading.Course(tmp_path_factory.mktemp("runs"))) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        answers.warm_up()
        yield one.address
        one.shutdown()


@pytest.fixture(scope="module")
def chromium():
    arguments = QUIET + (["--no-sandbox"] if os.getuid() == 0 else [])      # which root has none of
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
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
        page.on("console", lambda said: wrong.append((name, said.text)))
        page.on("pageerror", lambda error: wrong.append((name, str(error))))
        page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(
            (address, "file:")) else None)
        page.goto(name if name.startswith("file:") else address + name)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not wrong


def shoot(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def asked(address, question):
    return json.load(urllib.request.urlopen(f"{address}api/{question}"))


def widths(page, bar):
    """{cause: width} of a bar's parts."""
    return dict(page.eval_on_selector_all(
        f"{bar} rect[data-cause]",
        "all => all.map(one => [one.dataset.cause, Number(one.getAttribute('width'))])"))


def verdict(page, words, place="#verdict", timeout=20):
    """Wait until the page's verdict, or another place of it, has these words."""
    end = time.monotonic() + timeout
    while words not in page.inner_text(place):
        assert time.monotonic() < end, page.inner_text(place)
        page.wait_for_timeout(50)


PAGES = [name for name in reading.Course().site() if name.endswith(".html")]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens(open_page, name):
    for width, scheme in ((1300, "light"), (390, "dark")):
        page = open_page(name, width=width, color_scheme=scheme)
        page.wait_for_load_state("networkidle")
        assert page.locator("h1").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it is too wide"
        assert not page.locator("#problem").is_visible()
        shoot(page, f"{name.removesuffix('.html')}-{width}-{scheme}")


def test_sliders_change_the_bars_to_what_the_planner_says(open_page, address):
    page = open_page("planner.html#model=70b&cluster=h100&gpus=512")
    verdict(page, "✓ fits")
    best = asked(address, "best?model=70b&cluster=h100&gpus=512&batch=2048&software=megatron-2024")
    assert best["plans"][0]["words"] in page.inner_text("#verdict")
    rows = page.locator("#plans tr").all_inner_texts()
    for plan, row in zip(best["plans"], rows[1:], strict=True):
        assert row.startswith(plan["words"])

    for slider, key, words in (("tp", "ArrowRight", "tp 8"), ("zero", "ArrowLeft", "zero 1")):
        page.locator(f"input[name={slider}]").focus()
        page.keyboard.press(key)
        verdict(page, words)
    layout = dict(pair.split("=") for pair in page.url.split("#")[1].split("&"))
    assert layout["tp"] == "8" and layout["zero"] == "1"
    layout.pop("seq")                                   # the model's own
    plan = asked(address, "plan?" + "&".join(f"{key}={value}" for key, value in layout.items()))
    assert f"{plan['seconds']:.1f} s a step" in page.inner_text("#verdict")
    across = max(plan["capacity"] * 1.02, plan["bytes"])
    for bar, parts, most in (("#memory", plan["memory"], across),
                             ("#seconds", plan["time"], plan["seconds"])):
        drawn = widths(page, bar)
        for cause, value in parts.items():
            assert drawn[cause] == pytest.approx(900 * value / most, abs=1e-6)
    shoot(page, "planner-changed")

    page.locator("input[name=master_bytes]").focus()
    page.keyboard.press("ArrowLeft")                    # 2 bytes in place of 4
    verdict(page, "--master-bytes=2", "#command")
    assert "master_bytes=2" in page.url
    page.keyboard.press("ArrowRight")
    verdict(page, best["plans"][0]["words"])
    for slider, key, words in (("tp", "ArrowRight", "tp 8"), ("zero", "ArrowLeft", "zero 1")):
        page.locator(f"input[name={slider}]").focus()
        page.keyboard.press(key)
        verdict(page, words)

    again = open_page("planner.html" + "#" + page.url.split("#")[1])     # a link holds all of it
    verdict(again, f"{plan['seconds']:.1f} s a step")
    assert widths(again, "#seconds") == widths(page, "#seconds")
    page.locator("#plans button").nth(3).click()
    verdict(page, best["plans"][3]["words"])
    page.locator("#map button", has_text="%").first.click(timeout=60_000)
    verdict(page, "✓ fits")


def test_what_does_not_fit_is_said(open_page):
    page = open_page("planner.html#model=405b&gpus=8")
    verdict(page, "✗ needs")
    page.locator("#problem").wait_for()
    assert "--gpus 128 would work" in page.inner_text("#problem")
    page.locator("select[name=model]").select_option("1b")
    verdict(page, "✓ fits")
    assert not page.locator("#problem").is_visible()


def test_a_schedule_plays(open_page, address):
    page = open_page("schedules.html#schedule=zb-h1&ranks=4&micro_batches=8")
    verdict(page, "bubble")
    told = asked(address, "schedule?schedule=zb-h1&ranks=4&micro_batches=8")
    assert f"bubble {100 * told['bubble']:.1f}%" in page.inner_text("#verdict")
    actions = page.locator("#time .action")
    assert actions.count() == sum(map(len, told["actions"]))
    seen = "all => all.filter(one => one.getAttribute('opacity') === '1').length"
    page.click("#run")
    page.wait_for_timeout(1500)
    some = page.eval_on_selector_all("#time .action", seen)
    assert 0 < some < actions.count()                   # it is on its way
    shoot(page, "schedules-playing")
    page.locator("#run", has_text="play").wait_for(timeout=30_000)         # it has ended
    assert page.eval_on_selector_all("#time .action", seen) == actions.count()
    page.click("#next")                                 # one micro-batch, through all ranks
    assert page.eval_on_selector_all("#time .action", seen) == 4 * 3
    assert page.inner_text("#lists").splitlines()[0].split()[2:5] == told["lists"][0].split()[:3]


def test_the_ring_waits_and_the_zigzag_does_not(open_page, address):
    page = open_page("rings.html#ranks=4")
    verdict(page, "1.75 times as long")
    page.click("#next")
    assert "1 of 4 ranks wait (0)" in page.inner_text("#ring-says")
    assert "all compute 2,048 pairs" in page.inner_text("#zigzag-says")
    told = asked(address, "ring?ranks=4")
    now = sum(len(one["shapes"]) for one in told["ring"]["hops"][1])
    assert page.locator("#ring-matrix .block[opacity='1']").count() == now
    page.locator("input[name=ranks]").focus()
    page.keyboard.press("ArrowRight")
    verdict(page, "On 5 ranks the ring takes 1.80 times")


def test_documents_lie_in_frames_and_are_cut(open_page, address):
    page = open_page("rings.html#ranks=4&documents=32&hop=3")
    told = asked(address, "ring?ranks=4&documents=32")
    busiest = told["busiest"]
    verdict(page, f"{busiest['sequence']:.2f} if a zig-zag cuts the sequence, and "
                  f"{busiest['document']:.2f} if")
    assert "Hop 3 is not needed" in page.inner_text("#ring-says")
    assert page.locator("#zigzag-matrix .frame").count() == len(told["zigzag"]["documents"])
    shoot(page, "rings-sequence")
    page.locator("select[name=cut]").select_option("document")
    page.locator("#zigzag-matrix .padding").first.wait_for(state="attached")
    assert "all compute" in page.inner_text("#zigzag-says")
    assert "documents=32" in page.url and "cut=document" in page.url
    shoot(page, "rings-document")
    for _ in range(13):                                 # a mean of 16 would be too short for these
        page.locator("input[name=ranks]").press("ArrowRight")
    page.locator("input[name=documents]").press("ArrowLeft")
    verdict(page, "On 16 ranks")
    assert not page.locator("#problem").is_visible()
    shoot(page, "rings-16")


def test_a_rank_shows_what_it_holds(open_page, address):
    page = open_page("cuts.html#pp=2&dp=2&tp=2")
    page.locator("#ranks button").nth(5).click()
    told = asked(address, "cuts?pp=2&dp=2&tp=2")["ranks"][5]
    assert "rows 32 to 63" in page.inner_text("#matrices")
    assert told["shards"]["attn.q"] == [[64, 64], [[0, 1, 2]]]
    assert "rank 7" in page.inner_text("#says") and "block3" in page.inner_text("#says")
    assert page.url.endswith("rank=5")


def test_a_roofline_says_which_line_is_above(open_page, address):
    page = open_page("roofline.html#cluster=h100&chips=512&strategy=zero-3&tokens=1024")
    told = asked(address, "roofline?cluster=h100&chips=512&strategy=zero-3")
    verdict(page, told["says"])
    assert "messages are above" in page.inner_text("#now")
    assert page.locator("#lines polyline").count() == 4     # no tp
    for _ in range(4):
        page.locator("input[name=tokens]").press("ArrowRight")
    assert "compute is above" in page.inner_text("#now") and "tokens=4096" in page.url
    page.locator("select[name=cluster]").select_option("tpu-v5p")
    page.locator("select[name=strategy]").select_option("both")
    verdict(page, "with ZeRO-3 over 64 and tp over 8")
    assert "zero_axes=2" in page.url and page.locator("#lines polyline").count() == 5
    shoot(page, "roofline-both")


def test_it_works_without_a_mouse(open_page, address):
    page = open_page("06_context_parallel.html")
    for _ in range(4):
        page.keyboard.press("j")
    here = "all => all.findIndex(one => one.matches('.here'))"
    assert page.eval_on_selector_all("[data-part]", here) == 3
    page.keyboard.press("k")
    page.keyboard.press("/")
    page.locator("#page-search input").wait_for()
    page.keyboard.type("meeting queries", delay=20)
    page.locator("#page-search li a").first.wait_for()
    assert "06 · meeting" in page.inner_text("#page-search ol")
    shoot(page, "search")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/*#*")
    assert not page.locator("#page-search").is_visible()
    page.keyboard.press("]")
    page.wait_for_url("**/07_pipeline_parallel.html")
    page.keyboard.press("?")
    assert page.locator("#page-keys").is_visible()
    page.keyboard.press("Escape")
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    page.keyboard.press("t"), page.keyboard.press("t")
    assert page.evaluate(paper) != before               # dark; and it stays so
    page.keyboard.press("]")
    page.wait_for_url("**/08_expert_parallel.html")
    assert page.evaluate(paper) != before
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_hints_and_versions_unfold(open_page):
    page = open_page("05_sequence_parallel.html")
    hint = page.locator(".exercise details").first
    assert not hint.locator("p").is_visible()
    hint.locator("summary").click()
    assert hint.locator("p").is_visible()
    before = page.locator("#train_step details.before")
    before.locator("summary").click(position={"x": 5, "y": 5})
    assert before.locator("tr.differs").first.is_visible()
    shoot(page, "before-and-now")


def test_it_prints(open_page, tmp_path):
    page = open_page("04_tensor_parallel.html")
    page.pdf(path=SHOTS / "04.pdf")
    assert (SHOTS / "04.pdf").stat().st_size > 50_000
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()


def test_files_open_without_a_server(open_page, tmp_path):
    server.write(tmp_path, reading.Course(computes=False))
    for name in ("index", "06_context_parallel", "rings", "schedules", "cuts"):
        page = open_page(f"file://{tmp_path}/{name}.html")
        page.wait_for_load_state("load")
        assert page.locator("h1").count() == 1 and not page.locator("#problem").is_visible()
    page = open_page(f"file://{tmp_path}/planner.html")
    verdict(page, "✓ fits")
    page.locator("select[name=recompute]").select_option("full")
    page.locator("#problem").wait_for()
    assert "make page" in page.inner_text("#problem")
