"""The tools in a browser: they draw the answers, and each control moves something.

The planner has a file of its own, test_planner.py.
"""

from urllib.parse import urlencode

import pytest

from lab.site import tools
from tests.lab.site.in_browser.seen import answer_of, broken, move, settled, shoot, sliders

pytestmark = pytest.mark.full
TOOLS = [name for name in tools.TOOLS if name != "planner"]
LESSONS = {"00_collectives": "collectives", "03_zero": "memory", "04_tensor_parallel": "cuts",
           "06_context_parallel": "rings", "07_pipeline_parallel": "schedules", "09_5d": "cuts",
           "10_planner": "planner"}


# ------------------------------------------------------------------------------- what all tools do


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (390, "dark")])
@pytest.mark.parametrize("tool", TOOLS)
def test_each_control_moves_something_and_keeps_to_the_rules(open_page, tool, width, scheme):
    """What is below a picture may shift when a control makes it taller."""
    page = open_page(f"{tool}.html", width, color_scheme=scheme)
    settled(page)
    found = broken(page)
    for name in sliders(page):
        before, link = page.inner_html(".results"), page.url
        was = move(page, name)
        assert page.inner_html(".results") != before or page.url != link, name
        assert page.locator(".problem").is_hidden(), (name, page.inner_text(".problem"))
        found += [f"after {name}: {line}" for line in broken(page, "pale", "overlaps")]
        move(page, name, was)
    for select in page.locator("[data-tool] form select").all():
        if select.is_visible() and select.is_enabled():
            before = page.inner_html(".results")
            others = select.locator("option:not(:checked):not(:disabled)")
            select.select_option(others.last.get_attribute("value"))
            settled(page)
            assert page.inner_html(".results") != before, select.get_attribute("name")
            found += broken(page, "pale", "overlaps")
    assert not found, "\n".join(found)
    shoot(page, f"{tool}-used-{width}")


@pytest.mark.parametrize("tool", tools.TOOLS)
def test_a_bad_link_is_refused_in_a_line_above_what_the_page_begins_with(open_page, tool):
    page = open_page(f"{tool}.html")
    before = settled(page)
    bad = {"collectives": "ranks=0", "cuts": "tp=3", "rings": "cut=foo", "schedules": "F=-1",
           "memory": "billions=x", "roofline": "cluster=foo", "planner": "model=foo"}[tool]
    page = open_page(f"{tool}.html#{bad}&colour=pink", 390)
    after = settled(page)
    problem = page.inner_text(".problem")
    assert bad.split("=")[0] in problem and "colour" in problem and "--" not in problem
    assert len(problem.splitlines()) == 1 and not page.locator(".refused").count()
    assert after == before and "pink" not in page.url and bad not in page.url
    assert not broken(page, "pale", "overlaps")


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_plays_its_tool_at_once(open_page, lesson):
    """It brings the first answer along, and asks for more when something is moved."""
    page = open_page(f"{lesson}.html", color_scheme="dark")
    mounted = f"#play-{LESSONS[lesson]}"
    tool, loaded = page.locator(mounted), []
    page.on("request", lambda one: loaded.append(one.url) if "/answers/" in one.url else None)
    settled(page)
    before = tool.locator(".results").inner_html()
    assert tool.locator(".verdict").inner_text() and not loaded
    for name in sliders(page, mounted):
        move(page, name, tool=mounted)
    assert tool.locator(".results").inner_html() != before and loaded and "#" not in page.url
    links = [one.get_attribute("href") for one in tool.locator(".more a").all()]
    assert all(link.startswith(f"{LESSONS[lesson]}.html#") for link in links)
    assert not broken(page, "pale", "overlaps")


@pytest.mark.parametrize("tool", ["collectives", "rings", "schedules", "memory"])
def test_it_plays_to_its_end_without_motion_if_none_is_wanted(open_page, tool):
    link = "#micro_batches=2" if tool == "schedules" else ""
    page = open_page(f"{tool}.html{link}", reduced_motion="reduce")
    settled(page)
    run = page.locator("button.run")
    page.evaluate("""() => { window.frames_seen = new Set(); new MutationObserver(() => {
        frames_seen.add(document.querySelector(".results").outerHTML);
        window.animated ||= document.querySelectorAll(".travels").length;
    }).observe(document.querySelector(".results"), { childList: true, subtree: true,
                                                     attributes: true }); }""")
    run.click()
    page.wait_for_function("() => document.querySelector('button.run').innerText === 'play' "
                           "&& frames_seen.size > 2")
    assert not page.evaluate("window.animated") and not broken(page, "moving")


# --------------------------------------------------------------------------------------- each tool


def cells(page):
    """{(rank, row, place in it): what the cell holds}."""
    return {tuple(one[:3]): one[3] for one in page.eval_on_selector_all(
        ".stage .cell", """all => all.map(({ dataset: { rank, row, at, cell } }) => [
            Number(rank), Number(row), Number(at), cell])""")}


def test_rounds_of_a_collective_are_drawn_as_they_were_played(open_page):
    page = open_page("collectives.html", reduced_motion="reduce")
    settled(page)
    for name in ("all_reduce_ring", "broadcast", "all_gather", "barrier"):
        page.select_option("select[name=collective]", name)
        settled(page)
        told = answer_of("collectives", collective=name)
        for i, state in enumerate(told["states"]):
            if i:
                page.press("input[name=round]", "ArrowRight")
                sent = page.eval_on_selector_all(".message", """all => all.map(
                    ({ dataset: { from, to } }) => [Number(from), Number(to)])""")
                assert sent == [message[:2] for message in told["rounds"][i - 1]]
            assert cells(page) == {(rank, row, at): cell for rank, rows in enumerate(state)
                                   for row, held in enumerate(rows) for at, cell in enumerate(held)}
    shoot(page, "collectives")


@pytest.mark.parametrize("mesh", [
    {"pp": 1, "dp": 2, "tp": 4, "experts": 8, "ep": 4},
    {"chapter": "04_tensor_parallel", "tp": 4, "pp": 1, "dp": 1}])
def test_a_rank_shows_the_share_of_each_matrix_that_it_holds(open_page, mesh):
    page = open_page(f"cuts.html#{urlencode(mesh)}")
    settled(page)
    page.locator(".ranks button").nth(3).click()
    assert "rank=3" in page.url
    answer = answer_of("cuts", **mesh)
    shards = answer["holdings"][answer["ranks"][3]["holding"]]["shards"]
    held = page.eval_on_selector_all(".held", """all => all.map(one => {
        let whole = one.previousSibling;
        while (!whole.matches(".empty")) whole = whole.previousSibling;
        const area = of => of.getAttribute("width") * of.getAttribute("height");
        return [one.dataset.matrix, area(one) / area(whole)];
    })""")
    assert {name for name, _ in held} == shards.keys()
    for name, (shape, cuts) in shards.items():
        share = float(shape[0] if len(shape) > 2 else 1)
        for _, _, parts in cuts:
            share /= parts
        drawn = sum(area for matrix, area in held if matrix == name)
        assert drawn == pytest.approx(share, rel=1e-6), name
    shoot(page, "cuts")


def test_the_bars_of_memory_are_as_wide_as_their_bytes(open_page):
    page = open_page("memory.html#billions=70&ranks=64&precision=bf16&stage=zero2&gpu=h200")
    settled(page)
    told = answer_of("memory", billions=70, ranks=64, precision="bf16")
    whole = float(page.get_attribute(".bars svg", "viewBox").split()[2])
    drawn = page.eval_on_selector_all(
        ".bars .stage", """all => all.map(stage => [...stage.querySelectorAll(".piece")].map(
            one => [Number(one.dataset.bytes), parseFloat(one.style.width)]))""")
    for one, pieces in zip(told["stages"], drawn, strict=True):
        assert [size for size, _ in pieces] == one["kept"]
        for size, wide in pieces:
            assert wide == pytest.approx(size / sum(told["whole"]) * whole, abs=0.1)
    shoot(page, "memory")


@pytest.mark.parametrize(("asked", "hop"), [
    ({"ranks": 16}, 12), ({"ranks": 5, "documents": 64, "cut": "document"}, 2)])
def test_a_ring_has_the_blocks_of_its_hops(open_page, asked, hop):
    page = open_page(f"rings.html#{urlencode(asked | {'hop': hop})}")
    settled(page)
    told = answer_of("rings", **asked)
    for variant in ("ring", "zigzag"):
        counts = [sum(map(len, ranks)) for ranks in told[variant]["shapes"]]
        drawn = [page.locator(f".{variant}-matrix .block.{kind}").count()
                 for kind in ("past", "now", "later")]
        assert drawn == [sum(counts[:hop]), counts[hop], sum(counts[hop + 1:])]
    assert not broken(page, "pale", "overlaps")
    shoot(page, f"rings-{hop}")


def test_the_actions_of_a_schedule_are_as_long_as_they_take(open_page):
    asked = {"schedule": "1f1b", "ranks": 4, "micro_batches": 16}
    page = open_page(f"schedules.html#{urlencode(asked)}")
    settled(page)
    told = answer_of("schedules", **asked)
    assert f"{100 * told['bubble']:.1f}%" in page.inner_text(".verdict")
    drawn = page.eval_on_selector_all(".time .action", """all => all.map(one => [one.dataset.kind,
        Number(one.dataset.micro), Number(one.firstChild.getAttribute("x")),
        Number(one.firstChild.getAttribute("width"))])""")
    scale = max(left + wide for *_, left, wide in drawn) / told["end"]
    for one, (kind, _, micro, start, end) in zip(drawn, sum(told["actions"], []), strict=True):
        assert one[:2] == [kind, micro]
        assert one[2:] == pytest.approx([start * scale, (end - start) * scale], abs=0.01)
    counts = page.locator(".alive .count").all_text_contents()
    assert [text.split()[-1] for text in counts] == [str(most) for most in told["most_alive"]]
