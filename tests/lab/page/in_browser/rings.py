"""The tool of rings, on its own page and in lesson 06."""

import pytest

from tests.lab.page.in_browser import rules
from tests.lab.page.in_browser.seen import asked, shoot, verdict

FIT = """all => all.filter(block => {
  const [shape, text] = [block.querySelector("polygon"), block.querySelector("text")];
  if (!text) return false;
  const [x, y, size] = ["x", "y", "font-size"].map(name => Number(text.getAttribute(name)));
  const half = text.getComputedTextLength() / 2, svg = shape.ownerSVGElement;
  const ends = [[-half, 0], [half, 0], [half, -0.72 * size], [-half, -0.72 * size]];
  return !ends.every(([right, down]) => {
    const point = svg.createSVGPoint();
    [point.x, point.y] = [x + right, y + down];
    return shape.isPointInFill(point);
  });
}).map(block => block.textContent)"""


def blocks(page, variant, kind, place="[data-tool]"):
    return page.locator(f"{place} .{variant}-matrix .block.{kind}").count()


def test_the_ring_waits_and_the_zigzag_does_not(open_page, address):
    page = open_page("rings.html#ranks=4")
    verdict(page, "1.75 times as long")
    page.click(".next")
    assert "1 of 4 ranks waits (0)" in page.inner_text(".ring-says")
    assert "all compute 2,048 pairs" in page.inner_text(".zigzag-says")
    told = asked(address, "ring?ranks=4")
    for variant in ("ring", "zigzag"):
        counts = [sum(map(len, ranks)) for ranks in told[variant]["shapes"]]
        assert [blocks(page, variant, kind) for kind in ("past", "now", "later")] == [
            counts[0], counts[1], sum(counts[2:])]
    assert page.get_attribute(".ring-matrix svg", "aria-label").startswith(
        "Ring on 4 ranks, queries down and keys across. Hop 1: ")
    assert "rank 0 2,080, rank 1 6,176" in page.get_attribute(".ring-work svg", "aria-label")
    page.locator("input[name=ranks]").focus()
    page.keyboard.press("ArrowRight")
    verdict(page, "On 5 ranks the ring takes 1.80 times")
    page.press("input[name=hop]", "End")
    assert "4 of 5 ranks wait (0 to 3)" in page.inner_text(".ring-says")
    page.click(".next")                                 # around
    assert "hop=0" in page.url
    page.click(".previous")
    assert "hop=4" in page.url


def test_documents_lie_in_frames_and_are_cut(open_page, address):
    page = open_page("rings.html#ranks=4&documents=64&hop=3")
    told = asked(address, "ring?ranks=4&documents=64")
    busiest = told["busiest"]
    verdict(page, f"{busiest['sequence']:.2f} if a zig-zag cuts the sequence, and "
                  f"{busiest['document']:.2f} if", ".sums")
    assert "Hop 3 is not needed" in page.inner_text(".ring-says")
    assert page.locator(".zigzag-matrix .frame").count() == len(told["zigzag"]["documents"])
    shoot(page, "rings-sequence")
    page.locator("select[name=cut]").select_option("document")
    page.locator(".zigzag-matrix .padded").first.wait_for(state="attached")
    assert "all compute" in page.inner_text(".zigzag-says")
    assert "documents=64" in page.url and "cut=document" in page.url
    shoot(page, "rings-document")
    for _ in range(13):                                 # a mean of 32 would be too short for these
        page.locator("input[name=ranks]").press("ArrowRight")
    verdict(page, "On 16 ranks")
    page.locator("input[name=documents]").press("ArrowLeft")
    page.wait_for_url("**documents=0&cut=document**")
    assert not page.locator(".problem").is_visible()
    shoot(page, "rings-16")


def test_every_control_moves_something(open_page):
    page = open_page("rings.html#ranks=6&documents=64")
    verdict(page, "On 6 ranks")
    for name, key in (("ranks", "ArrowRight"), ("documents", "ArrowRight"), ("window", "End"),
                      ("hop", "ArrowRight")):
        before = page.inner_html(".zigzag-matrix")
        page.press(f"input[name={name}]", key)
        page.wait_for_timeout(50)
        for _ in range(100):
            if page.inner_html(".zigzag-matrix") != before:
                break
            page.wait_for_timeout(50)
        else:
            pytest.fail(name)
        assert page.is_hidden(".problem")
    assert "ranks=7&documents=128&cut=sequence&window=64&hop=1" in page.url


@pytest.mark.parametrize(("link", "scheme"), [
    ("ranks=4&hop=1", "dark"), ("ranks=16&hop=12", "light"), ("ranks=16&hop=5", "dark"),
    ("ranks=5&documents=64&cut=document&hop=2", "light"), ("ranks=6&window=16&hop=1", "light")])
def test_digits_lie_within_their_shapes_and_can_be_read(open_page, link, scheme):
    page = open_page(f"rings.html#{link}", color_scheme=scheme)
    page.locator(".block text").first.wait_for()
    assert page.locator(".block text").count() > 10
    assert page.eval_on_selector_all(".block", FIT) == []
    assert rules.pale(page) == [] and rules.overlaps(page) == []
    if "ranks=16&hop=12" in link:
        assert page.locator(".block.now text", has_text="12").count() >= 4
    shoot(page, f"rings-{link.replace('&', '-')}-{scheme}")


def test_hops_play_in_the_lesson(open_page, address):
    page = open_page("06_context_parallel.html", reduced_motion="reduce")
    tool = page.locator("#play-rings")
    assert "On 4 ranks the ring takes 1.75" in tool.locator(".verdict").inner_text()
    assert tool.locator("form input, form select").count() == 2         # ranks and hop
    tool.locator(".run").click()
    tool.locator(".run", has_text="play").wait_for()
    assert "Hop 3: " in tool.locator(".zigzag-says").inner_text()
    told = asked(address, "ring?ranks=4")
    drawn = blocks(page, "zigzag", "now", "#play-rings")
    assert drawn == sum(map(len, told["zigzag"]["shapes"][3]))
    assert tool.locator(".more a").get_attribute("href").endswith("window=0&hop=3")
    assert "#" not in page.url


@pytest.mark.parametrize(("link", "line", "shown"), [
    ("ranks=0", "ranks = '0' is no whole number from 1 to 16", "On 4 ranks"),
    ("ranks=9&documents=16&cut=document", "documents=18 would work", "On 4 ranks"),
    ("cut=foo", "cut = 'foo' is none of sequence, document", "On 4 ranks"),
    ("hop=-1", "There is no hop -1 on 4 ranks: this is hop 0", "On 4 ranks"),
    ("ranks=3&hop=8", "There is no hop 8 on 3 ranks: this is hop 2", "On 3 ranks")])
def test_a_bad_link_is_told_in_a_line(open_page, link, line, shown):
    page = open_page(f"rings.html#{link}")
    page.locator(".problem", has_text=line).wait_for()
    verdict(page, shown)
    assert page.locator(".ring-matrix .block").count() > 3 and not page.locator(".refused").count()
    if "hop" in link:
        assert f"hop={line[-1]}" in page.url
    page.click(".next")
    page.locator(".problem").wait_for(state="hidden")


def test_one_rank_is_no_plural(open_page):
    page = open_page("rings.html#ranks=1")
    verdict(page, "On 1 rank the ring takes 1.00 times")
