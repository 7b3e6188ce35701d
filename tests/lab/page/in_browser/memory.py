"""The tool of memory, on its own page and in lesson 03."""

import pytest

from tests.lab.page.in_browser.seen import asked, shoot, verdict


def drawn(page, place):
    """Of each stage, the bytes of its pieces, and their widths."""
    return page.eval_on_selector_all(
        f"{place} .stage", """all => all.map(stage => [...stage.querySelectorAll(".piece")].map(
            one => [Number(one.dataset.bytes), parseFloat(one.style.width)]))""")


def test_bars_are_as_wide_as_their_bytes(open_page, address):
    page = open_page("memory.html#billions=70&ranks=64&precision=bf16&stage=zero2&gpu=h200")
    verdict(page, "zero2: 158 GB on each of 64 ranks")
    told = asked(address, "memory?billions=70&ranks=64&precision=bf16")
    whole = float(page.get_attribute(".bars svg", "viewBox").split()[2])
    for one, pieces in zip(told["stages"], drawn(page, ".bars"), strict=True):
        assert [size for size, _ in pieces] == one["kept"]
        for size, wide in pieces:
            assert wide == pytest.approx(size / sum(told["whole"]) * whole, abs=0.1)
    assert "1/64" in page.get_attribute(".parts svg", "aria-label")
    assert "and 56 ranks more" in page.text_content(".parts")
    shoot(page, "memory")


def test_every_control_moves_something(open_page):
    page = open_page("memory.html")
    verdict(page, "zero3: 14 GB")
    for name in ("stage", "ranks", "billions"):
        before = page.inner_text(".verdict"), page.inner_html(".bars"), page.inner_html(".parts")
        page.locator(f"input[name={name}]").press("ArrowLeft")
        page.wait_for_function("old => document.querySelector('.verdict').innerText !== old",
                               arg=before[0])
        assert page.is_hidden(".problem")
    page.select_option("select[name=precision]", "bf16")
    verdict(page, "of 54 GB")
    page.select_option("select[name=gpu]", "h200")
    verdict(page, "the 141 GB of h200")
    assert "stage=zero2&gpu=h200" in page.url and "billions=3" in page.url


def test_stages_play_in_the_lesson(open_page):
    page = open_page("03_zero.html")
    tool = page.locator("#play-memory")
    assert "zero3: 14 GB" in tool.locator(".verdict").inner_text()      # at once: it came along
    tool.locator(".run").click()
    for words in ("02 data parallel: 112 GB", "zero1: 63 GB", "zero2: 38.5 GB", "zero3: 14 GB"):
        verdict(page, words, "#play-memory .verdict")
    assert tool.locator(".run").inner_text() == "play"
    assert "#" not in page.url                          # a lesson's link is the lesson's


@pytest.mark.parametrize(("link", "line"), [
    ("ranks=0", "ranks = '0' is no whole number"), ("stage=zero9", "stage = 'zero9' is none of"),
    ("billions=x", "billions = 'x' is no number"), ("gpu=abacus", "gpu = 'abacus' is none of")])
def test_a_bad_link_is_told_in_a_line_above_what_the_page_begins_with(open_page, link, line):
    page = open_page(f"memory.html#{link}")
    page.locator(".problem", has_text=line).wait_for()
    page.wait_for_url("**billions=7&ranks=8&precision=fp32&stage=zero3&gpu=h100")
    assert page.locator(".bars .stage").count() == 4 and page.locator(".refused").count() == 0


def test_of_a_bad_link_what_is_good_stays(open_page):
    page = open_page("memory.html#billions=abc&ranks=4&stage=02")
    page.wait_for_url("**billions=7&ranks=4&precision=fp32&stage=02&gpu=h100")
    assert page.inner_text(".problem") == "billions = 'abc' is no number from 0.001 to 10000"
    verdict(page, "It fits the 80 GB of h100 on no number of ranks up to 4,096.")


def test_no_label_lies_on_the_line_of_a_gpus_memory(open_page):
    page = open_page("memory.html#stage=zero2&ranks=16")
    verdict(page, "zero2: ")
    line = page.get_attribute(".bars path.room", "d")
    x = float(line[1:].split()[0])
    rows = [float(part.split("v")[0].split()[1]) for part in line.split("M")[1:]]
    spans = page.eval_on_selector_all(".bars text", """all => all.map(one => one.getBBox()).map(
        ({ x, y, width, height }) => [x, x + width, y, y + height])""")
    assert len(rows) == 4 and any(left < x < right for left, right, *_ in spans)
    for left, right, top, bottom in spans:
        assert not left < x < right or all(bottom <= row + 2 or row + 22 <= top for row in rows)
