"""The tool of cuts, on its own page and in lessons 04 and 09."""

import pytest

from tests.lab.page.in_browser import rules
from tests.lab.page.in_browser.seen import asked, shoot, verdict


def areas(page):
    """{matrix: the area that is filled}, in pixels."""
    return page.eval_on_selector_all(".held", """all => all.reduce((sum, one) => {
        const area = one.getAttribute("width") * one.getAttribute("height");
        return { ...sum, [one.dataset.matrix]: (sum[one.dataset.matrix] || 0) + area };
    }, {})""")


def test_a_rank_shows_what_it_holds(open_page, address):
    page = open_page("cuts.html#pp=2&dp=2&tp=2")
    page.locator(".ranks button").nth(5).click()
    told = asked(address, "cuts?pp=2&dp=2&tp=2")["ranks"][5]
    assert "rows 32 to 63" in page.inner_text(".matrices")
    assert told["shards"]["attn.q"] == [[64, 64], [[0, 1, 2]]]
    assert "Rank 5, at pp 1, dp 0, tp 1" in page.inner_text(".verdict")
    assert "on rank 7, which sums" in page.inner_text(".verdict")
    assert "block3" in page.inner_text(".verdict") and page.locator(".alike").count() == 1
    assert "rank=5" in page.url
    shoot(page, "cuts")


@pytest.mark.parametrize("mesh", ["pp=1&dp=2&tp=4&experts=8&ep=4", "tp=8&kv_heads=2&pp=1&dp=1",
                                  "chapter=04_tensor_parallel&tp=4&pp=1&dp=1"])
def test_what_is_filled_is_the_share_that_was_told(open_page, address, mesh):
    page = open_page(f"cuts.html#{mesh}&rank=3")
    verdict(page, "Rank 3")
    shards = asked(address, f"cuts?{mesh}")["ranks"][3]["shards"]
    drawn = areas(page)
    assert drawn.keys() == shards.keys()
    for name, (shape, cuts) in shards.items():
        rows, columns, share = *shape[-2:], 1.0
        for _, _, parts in cuts:
            share /= parts
        copies = shape[0] if len(shape) > 2 else 1
        scale = page.evaluate(f"""() => {{
            const held = document.querySelector('.held[data-matrix="{name}"]');
            let of = held.previousSibling;
            while (!of.matches('.empty')) of = of.previousSibling;
            return of.getAttribute('width') / {columns};
        }}""")
        assert drawn[name] == pytest.approx(rows * columns * copies * share * scale**2, rel=1e-6)


def test_sliders_offer_what_exists_and_move_something(open_page):
    page = open_page("cuts.html#experts=4&pp=2&dp=2")
    verdict(page, "Rank 0")
    for name in ("pp", "dp", "cp", "tp", "ep", "experts", "kv_heads", "layers"):
        before = page.inner_html(".results")
        control, url = page.locator(f"input[name={name}]"), page.url
        most = int(control.get_attribute("max"))
        control.press("ArrowRight" if int(control.input_value()) < most else "ArrowLeft")
        page.wait_for_function("old => location.href !== old", arg=url)
        assert page.inner_html(".results") != before or name == "layers"
        assert page.is_hidden(".problem")
    page.select_option("select[name=chapter]", "04_tensor_parallel")
    verdict(page, "Rank 0: it has embedding, block1 to block6, head")
    assert page.locator("input[name=pp]").is_disabled()


@pytest.mark.parametrize(("lesson", "ranks", "says"), [
    ("04_tensor_parallel.html", 4, "Rank 0, at tp 0"),
    ("09_5d.html", 8, "Rank 0, at pp 0, dp 0, tp 0")])
def test_lessons_show_it_at_once(open_page, lesson, ranks, says):
    page = open_page(lesson, color_scheme="dark")
    tool = page.locator("#play-cuts")
    assert says in tool.locator(".verdict").inner_text()
    assert tool.locator(".ranks button").count() == ranks
    tool.locator(".ranks button").last.click()
    assert f"Rank {ranks - 1}" in tool.locator(".verdict").inner_text()
    tool.locator("input[name=tp]").press("End")
    verdict(page, "neighbours share one", "#play-cuts .verdict")
    assert not rules.pale(page)


@pytest.mark.parametrize(("link", "line"), [
    ("rank=-1", "rank = '-1' is none of 0 to 7"), ("rank=99", "rank = '99' is none of 0 to 7"),
    ("rank=x", "rank = 'x' is none of 0 to 7"), ("tp=3", "heads 8 is not a multiple of tp = 3"),
    ("pp=x", "pp = 'x' is no whole number"), ("chapter=x", "chapter = 'x' is none of 09_5d")])
def test_a_bad_link_is_told_in_a_line_above_what_the_page_begins_with(open_page, link, line):
    page = open_page(f"cuts.html#{link}")
    page.locator(".problem", has_text=line).wait_for()
    assert "Rank 0, at pp 0" in page.inner_text(".verdict")
    assert page.url.endswith("&rank=0")
    assert page.locator(".ranks button").count() == 8 and not page.locator(".refused").count()
