"""The rules themselves: on small pages whose faults are known, each is found, and nothing else."""

import pytest

from tests.lab.page.in_browser import rules


@pytest.fixture
def show(chromium):
    """show(HTML): a page that has it, 400 pixels wide."""
    context = chromium.new_context(viewport={"width": 400, "height": 600})
    page = context.new_page()

    def one(body, style=""):
        page.set_content("<!doctype html><html lang=en><title>small</title><style>"
                         f"body {{ margin: 0; background: #fff; color: #000 }} {style}</style>"
                         f"<main>{body}</main>")
        return page

    yield one
    context.close()


def svg(inside, more=""):
    return f'<svg width="200" height="100" viewBox="0 0 200 100" {more}>{inside}</svg>'


def text(of="", said="7", x=50):
    return f'<text x="{x}" y="55" font-size="14" text-anchor="middle" {of}>{said}</text>'


@pytest.mark.parametrize("body, expected", [
    ("<p style='color: #767676'>a", 4.54),
    ("<p style='color: #777'>a", 4.48),
    ("<p style='color: white; background: #767676'>a", 4.54),
    ("<p style='color: #000000b3'>a", 8.59),                # .7 of black on white: #4c4c4c
    ("<div style='opacity: .5; background: #000'><p style='color: #fff'>a", 3.95),     # on white
    ("<div style='filter: invert(1); background: #fff'><p style='color: #888'>a", 4.69),
    ("<input value=a style='color: #767676; background: #fff'>", 4.54),
    ("<style>p::before { content: 'told'; color: #777 }</style><p>a", 4.48),
    (svg("<rect width='100' height='100' fill='#767676'/>" + text("fill='white'")), 4.54),
    (svg("<rect width='100' height='100' fill='#767676'/>" + text("fill='white'", x=150)), 1.0),
    (svg("<g opacity='.45'><rect width='100' height='100' fill='#355070'/>" + text("fill='white'")
         + "</g>"), 2.20),
    (svg("<rect width='100' height='100' fill='#355070' fill-opacity='.45'/>"
         + text("fill='white'")), 2.20),
    (svg("<polygon points='0,0 100,0 50,52' fill='black'/>" + text("fill='white'")), 1.0),
    (svg(text() + "<rect width='100' height='100' fill='white' opacity='.6'/>"), 2.85),
    (svg("<rect width='100' height='100' fill='black'/>"
         + text("stroke='#fff' stroke-width='4' paint-order='stroke' fill='#767676'")), 4.54),
    (svg("<g style='filter: brightness(.5)'><rect width='100' height='100' fill='#fff'/></g>"
         + text("fill='white'")), 3.95)])
def test_a_contrast_is_the_known_one(show, body, expected):
    assert rules.contrasts(show(body))[0]["ratio"] == pytest.approx(expected, abs=0.06)


def test_what_is_large_hidden_or_inactive_is_judged_so(show):
    page = show("<p style='color: #888; font-size: 24px'>large</p>"
                "<b style='color: #888; font-size: 19px'>bold</b>"
                "<p style='color: #888; font-size: 23px'>small</p>"
                "<p style='color: #eee' hidden>no</p><details><p style='color: #eee'>no</details>"
                "<button disabled style='color: #eee'>off</button>"
                "<div inert style='opacity: .3'>old</div>"
                "<a href='#' style='color: #eee; position: absolute; left: -999px'>skip</a>")
    assert [one["text"] for one in rules.pale(page)] == ["small"]


def test_a_chart_of_tool_is_read_as_it_looks(show):
    """A ring's block: its digit stands on its triangle, on a neighbor's, or beside both."""
    page = show(svg("<g><polygon points='0,0 100,100 0,100' fill='#355070'/>"
                    "<text x='30' y='80' font-size='14' class='in' fill='white'>3</text></g>"
                    "<g><polygon points='110,0 200,0 200,90' fill='#355070'/>"
                    "<text x='120' y='40' font-size='14' class='out' fill='white'>12</text></g>"))
    assert [one["where"].split(".")[-1] for one in rules.pale(page)] == ["out"]
    assert [(one["what"], one["text"]) for one in rules.overlaps(page)] == [
        ("outside of its polygon", "12")]


def test_texts_over_each_other_and_cut_are_found(show):
    page = show(svg("<text x='10' y='20'>first label</text><text x='60' y='24'>second</text>"
                    "<text x='170' y='80'>leaves</text><text x='10' y='80'>fine</text>"))
    found = [(one["what"], one["text"]) for one in rules.overlaps(page)]
    assert found == [("over the text second", "first label"),
                     ("cut off at the chart's edge", "leaves")]


def test_names(show):
    page = show("<a href='#'>&nbsp;</a><button aria-label='play'></button>"
                "<a href='#'><img alt='a figure' src='data:,'></a><input type=range>"
                "<label>ranks <input type=range></label>"
                "<label><output>4</output><input type=range></label>"
                + svg("", "role='img'") + svg("", "role='img' aria-label='a bar'")
                + svg("", "role='img' aria-label='1f1b on 4 ranks: bubble 27%'")
                + svg("", "aria-hidden='true'") + svg(text()))
    assert [(one["where"].split(" > ")[-1], one["what"].split()[-1]) for one in rules.unnamed(page)
            ] == [("a", "name"), ("input", "name"), ("input", "name"), ("svg", "name"),
                  ("svg", "shows"), ("svg", "aria-hidden")]


def test_tab_stops_are_those_of_the_key(show):
    page = show("<a href='#'>1</a><a href='#' tabindex=-1>no</a><button disabled>no</button>"
                "<button>2</button><details><summary>3</summary><a href='#'>no</a></details>"
                "<div style='width: 50px; overflow: auto; white-space: nowrap'>a long line of text"
                "</div><div style='overflow: auto'>short</div><input type=radio name=r checked>"
                "<input type=radio name=r><span tabindex=0>6</span>")
    found, pressed = rules.tab_stops(page), 0
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement !== document.body") and pressed < 20:
        pressed += 1
        page.keyboard.press("Tab")
    assert len(found) == pressed == 6


def test_shift_weight_and_what_moves(open_page, address, show):
    page = show("<p>above</p><p style='height: 300px; background: #eee'>below</p>"
                "<i class=turns>a</i>", "@keyframes turn { to { rotate: 1turn } } "
                ".turns { display: block; animation: turn 1s infinite }")
    assert rules.shift(page) == 0
    assert rules.moving(page) == ["main > i.turns"]
    page.evaluate("document.querySelector('p').style.height = '200px'")
    assert 0.1 < rules.shift(page) < 0.4
    assert "main > p" in rules.shifts(page)[0]["where"]
    served = open_page("questions.html")
    served.wait_for_load_state("networkidle")
    found = rules.weight(served)
    assert set(found) >= {f"{address}{name}" for name in ("questions.html", "page.css", "page.js")}
    assert all(found.values()) and rules.timings(served)["painted"] > 0
