"""The tool of planner."""

import pytest

from tests.lab.page.in_browser.seen import asked, shoot, verdict, widths


def test_sliders_change_the_bars_to_what_the_planner_says(open_page, address):
    page = open_page("planner.html#model=70b&cluster=h100&gpus=512")
    verdict(page, "✓ fits")
    best = asked(address, "best?model=70b&cluster=h100&gpus=512&batch=2048&software=megatron-2024")
    assert best["plans"][0]["words"] in page.inner_text(".verdict")
    rows = page.locator(".plans tr").all_inner_texts()
    for plan, row in zip(best["plans"], rows[1:], strict=True):
        assert row.startswith(plan["words"])

    for slider, key, words in (("tp", "ArrowRight", "tp 8"), ("zero", "ArrowLeft", "zero 1")):
        page.locator(f"input[name={slider}]").focus()
        page.keyboard.press(key)
        verdict(page, words)
    layout = dict(pair.split("=") for pair in page.url.split("#")[1].split("&"))
    assert layout["tp"] == "8" and layout["zero"] == "1"
    layout.pop("seq")                                   # the model's own
    plan = asked(address, "plan?" + "&".join(f"{key}={value}" for key, value in layout.items()))
    assert f"{plan['seconds']:.1f} s a step" in page.inner_text(".verdict")
    across = max(plan["capacity"] * 1.02, plan["bytes"])
    for bar, parts, most in ((".memory", plan["memory"], across),
                             (".seconds", plan["time"], plan["seconds"])):
        drawn = widths(page, bar)
        for cause, value in parts.items():
            assert drawn[cause] == pytest.approx(900 * value / most, abs=1e-6)
    shoot(page, "planner-changed")

    page.locator("input[name=master_bytes]").focus()
    page.keyboard.press("ArrowLeft")                    # 2 bytes in place of 4
    verdict(page, "--master-bytes=2", ".command")
    assert "master_bytes=2" in page.url
    page.keyboard.press("ArrowRight")
    verdict(page, best["plans"][0]["words"])
    for slider, key, words in (("tp", "ArrowRight", "tp 8"), ("zero", "ArrowLeft", "zero 1")):
        page.locator(f"input[name={slider}]").focus()
        page.keyboard.press(key)
        verdict(page, words)

    again = open_page("planner.html" + "#" + page.url.split("#")[1])     # a link holds all of it
    verdict(again, f"{plan['seconds']:.1f} s a step")
    assert widths(again, ".seconds") == widths(page, ".seconds")
    page.locator(".plans button").nth(3).click()
    verdict(page, best["plans"][3]["words"])
    page.locator(".map button", has_text="%").first.click(timeout=60_000)
    verdict(page, "✓ fits")


def test_what_does_not_fit_is_said(open_page):
    page = open_page("planner.html#model=405b&gpus=8")
    verdict(page, "✗ needs")
    page.locator(".problem").wait_for()
    assert "--gpus 128 would work" in page.inner_text(".problem")
    page.locator("select[name=model]").select_option("1b")
    verdict(page, "✓ fits")
    assert not page.locator(".problem").is_visible()
