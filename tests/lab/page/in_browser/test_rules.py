"""The rules themselves: on small pages with a known fault, each finds it, and nothing else."""

import pytest

from tests.lab.page.in_browser.seen import broken

pytestmark = pytest.mark.full


@pytest.fixture
def show(chromium):
    """show(HTML): a page with it, 400 pixels wide."""
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


def test_a_pale_text_is_found(show):
    on_blue = "<text x='50' y='55' text-anchor='middle' fill='white'>7</text>"
    blue = "<rect width='100' height='100' fill='#355070' {}/>"
    for body, ratio in (
            ("<p style='color: #777'>a", "4.5"), ("<p style='color: #767676'>a", None),
            ("<p style='color: #888; font-size: 24px'>large", None), (svg(on_blue), "1.0"),
            ("<div style='opacity: .4'><p>a", "2.8"), ("<p style='color: #eee' hidden>no", None),
            ("<button disabled style='color: #eee'>off</button>", None),
            (svg(blue.format("") + on_blue), None),
            (svg(blue.format("fill-opacity='.45'") + on_blue), "2.2")):
        found = [line.split(":")[0] for line in broken(show(body), "pale")]
        assert found == [f"contrast {ratio}"] * (ratio is not None), body


def test_texts_in_the_wrong_place_and_what_has_no_name_are_found(show):
    page = show(svg("<g><polygon points='110,0 200,0 200,90'/><text x='120' y='40'>12</text></g>"))
    assert broken(page, "overlaps") == ["outside of its shape: 12"]
    page = show(svg("<text x='10' y='20'>first label</text><text x='60' y='24'>second</text>"
                    "<text x='170' y='80'>leaves</text><text x='10' y='80'>fine</text>"))
    assert broken(page, "overlaps") == ["over each other: first label, second", "cut off: leaves"]
    page = show("<a href='#'>&nbsp;</a><button aria-label='play'></button>"
                "<a href='#'><img alt='a figure' src='data:,'></a><label>ranks <input></label>"
                "<input>" + svg("", "role='img' aria-label='bar'") + svg("", "role='img'"))
    assert [line.split()[3].strip(":") for line in broken(page)] == ["link", "textbox", "img"]


def test_what_moves_is_found(show):
    page = show("<p>above</p><p style='height: 300px; background: #eee'>below</p>"
                "<i class=turns>a</i>", "@keyframes turn { to { rotate: 1turn } } "
                ".turns { display: block; animation: turn 1s infinite }")
    assert broken(page) == [] and len(broken(page, "moving")) == 1
    page.evaluate("document.querySelector('p').style.height = '200px'")
    assert ["shifts" in line for line in broken(page)] == [True]
