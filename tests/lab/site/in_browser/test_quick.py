"""The one test in a browser that `make test` runs: a tool is shown, and answers."""

from lab.site import answers, build, pages, tools
from tests.lab.site.in_browser.seen import answer_of, move, settled


def test_a_tool_is_shown_and_answers(open_page, tmp_path):
    asked = {"documents": 0, "cut": "sequence", "window": 0}
    lines = {tools.written("ring", asked | {"ranks": n}): answers.answer("ring", asked | {
        "ranks": n}) for n in (4, 5)}
    files = {name: make for name, make in pages.Site().files().items()
             if name == "rings.html" or name.endswith((".js", ".css", ".svg"))}
    build.write_with(tmp_path, files, {"ring": lines}, None)
    page = open_page("rings.html", at=f"file://{tmp_path}/")
    settled(page)
    assert page.locator("h1").count() == 1
    move(page, "ranks")
    answer = answer_of("rings", ranks=5)
    for variant in ("ring", "zigzag"):
        shapes = sum(len(shape) for ranks in answer[variant]["shapes"] for shape in ranks)
        assert page.locator(f".{variant}-matrix .block").count() == shapes
    assert page.locator(".problem").is_hidden()
