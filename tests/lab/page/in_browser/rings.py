"""The tool of rings."""

from tests.lab.page.in_browser.seen import asked, shoot, verdict


def test_the_ring_waits_and_the_zigzag_does_not(open_page, address):
    page = open_page("rings.html#ranks=4")
    verdict(page, "1.75 times as long")
    page.click(".next")
    assert "1 of 4 ranks wait (0)" in page.inner_text(".ring-says")
    assert "all compute 2,048 pairs" in page.inner_text(".zigzag-says")
    told = asked(address, "ring?ranks=4")
    now = sum(len(one["shapes"]) for one in told["ring"]["hops"][1])
    assert page.locator(".ring-matrix .block[opacity='1']").count() == now
    page.locator("input[name=ranks]").focus()
    page.keyboard.press("ArrowRight")
    verdict(page, "On 5 ranks the ring takes 1.80 times")


def test_documents_lie_in_frames_and_are_cut(open_page, address):
    page = open_page("rings.html#ranks=4&documents=32&hop=3")
    told = asked(address, "ring?ranks=4&documents=32")
    busiest = told["busiest"]
    verdict(page, f"{busiest['sequence']:.2f} if a zig-zag cuts the sequence, and "
                  f"{busiest['document']:.2f} if")
    assert "Hop 3 is not needed" in page.inner_text(".ring-says")
    assert page.locator(".zigzag-matrix .frame").count() == len(told["zigzag"]["documents"])
    shoot(page, "rings-sequence")
    page.locator("select[name=cut]").select_option("document")
    page.locator(".zigzag-matrix .padding").first.wait_for(state="attached")
    assert "all compute" in page.inner_text(".zigzag-says")
    assert "documents=32" in page.url and "cut=document" in page.url
    shoot(page, "rings-document")
    for _ in range(13):                                 # a mean of 16 would be too short for these
        page.locator("input[name=ranks]").press("ArrowRight")
    page.locator("input[name=documents]").press("ArrowLeft")
    verdict(page, "On 16 ranks")
    assert not page.locator(".problem").is_visible()
    shoot(page, "rings-16")
