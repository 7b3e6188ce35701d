"""The rules themselves: they find known faults on small pages, and nothing else."""

import pytest

from tests.lab.site.in_browser.seen import broken

pytestmark = pytest.mark.full


@pytest.fixture
def show(chromium):
    """show(HTML): a page with it, 400 pixels wide."""
    context = chromium.new_context(viewport={"width": 400, "height": 600})
    page = context.new_page()

    def one(body):
        page.set_content("<!doctype html><html lang=en><title>small</title>"
                         f"<style>body {{ background: #fff; color: #000 }}</style>{body}")
        return page

    yield one
    context.close()


def svg(inside):
    return f'<svg width="200" height="100" viewBox="0 0 200 100">{inside}</svg>'


def test_each_kind_of_fault_is_found(show):
    on_blue = "<text x='50' y='55' text-anchor='middle' fill='{}'>7</text>"
    blue = "<rect width='100' height='100' fill='#355070'/>"
    for body, is_pale in (("<p style='color: #777'>a", True),
                          ("<p style='color: #767676'>a", False),
                          (svg(blue + on_blue.format("white")), False),
                          (svg(blue + on_blue.format("black")), True)):
        assert bool(broken(show(body), "pale")) == is_pale, body
    page = show(svg("<text x='10' y='20'>first label</text><text x='60' y='24'>second</text>"
                    "<text x='170' y='80'>leaves</text><text x='10' y='80'>fine</text>"))
    assert broken(page, "overlaps") == ["over each other: first label, second", "cut off: leaves"]
    page = show("<label>ranks <input></label><input>")
    assert ["no name" in line for line in broken(page)] == [True]
