"""What is set of a lesson, in a browser: formulas, tables, and the meaning of a letter."""

import pytest

from tests.lab.page.in_browser.seen import shoot


@pytest.mark.parametrize("width, scheme", [(1300, "light"), (390, "dark")])
def test_a_letter_says_what_it_means(open_page, width, scheme):
    page = open_page("04_tensor_parallel.html", width=width, color_scheme=scheme, has_touch=True)
    meaning = page.locator("#meaning")
    letter = page.locator(".lesson math [data-is=t-04]").first
    letter.scroll_into_view_if_needed()
    letter.hover()
    assert meaning.inner_text() == "ranks of tensor parallelism"
    box, at = meaning.bounding_box(), letter.bounding_box()
    assert 0 <= box["x"] and box["x"] + box["width"] <= width
    assert box["y"] >= at["y"] + at["height"] or box["y"] + box["height"] <= at["y"]
    shoot(page, f"meaning-{width}")
    page.keyboard.press("Escape")
    assert not meaning.is_visible()
    page.locator(".lesson i[data-is=W-04]").first.tap()
    assert meaning.inner_text() == "what a rank sends in a second, in bytes/s"
    page.locator("h1").tap()
    assert not meaning.is_visible()


def test_all_letters_are_told_to_the_keyboard(open_page):
    page = open_page("03_zero.html")
    told = page.locator(".symbols dl").first
    assert not told.is_visible()
    page.keyboard.press("s")
    assert "Ψ′\nthe parameters with the zeros of padding, in bytes" in told.inner_text()
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    ids = page.eval_on_selector_all("[data-entry]", "all => all.map(one => one.dataset.entry)")
    used = page.eval_on_selector_all("[data-is]", "all => all.map(one => one.dataset.is)")
    assert len(ids) == len(set(ids)) and set(used) == set(ids)
    page.keyboard.press("s")
    assert not told.is_visible()


@pytest.mark.parametrize("width", [1300, 390])
def test_lines_of_a_derivation_stand_below_each_other(open_page, width):
    page = open_page("06_context_parallel.html", width=width)
    formulas = page.locator(".formulas").first
    signs = formulas.locator("td:not(.left) mo:text-is('=')").all()
    assert len(signs) == 3
    assert len({round(sign.bounding_box()["x"]) for sign in signs}) == 1
    lines = [row.bounding_box()["y"] for row in formulas.locator("tr").all()]
    assert lines == sorted(lines)
    formulas.scroll_into_view_if_needed()
    shoot(page, f"derivation-{width}")


def test_a_formula_is_as_high_as_its_line(open_page):
    """A browser that knows no MathML would show letters side by side, a fraction no bar."""
    page = open_page("03_zero.html")
    bar = page.locator(".formulas mfrac").first
    above, below = (bar.locator(f":scope > :nth-child({i})").bounding_box() for i in (1, 2))
    assert above["y"] + above["height"] <= below["y"] + 2
    for formula in page.locator(".lesson p math").all()[:10]:
        assert formula.bounding_box()["height"] < 26
