"""The tool of cuts."""

from tests.lab.page.in_browser.seen import asked


def test_a_rank_shows_what_it_holds(open_page, address):
    page = open_page("cuts.html#pp=2&dp=2&tp=2")
    page.locator(".ranks button").nth(5).click()
    told = asked(address, "cuts?pp=2&dp=2&tp=2")["ranks"][5]
    assert "rows 32 to 63" in page.inner_text(".matrices")
    assert told["shards"]["attn.q"] == [[64, 64], [[0, 1, 2]]]
    assert "rank 7" in page.inner_text(".says") and "block3" in page.inner_text(".says")
    assert page.url.endswith("rank=5")
