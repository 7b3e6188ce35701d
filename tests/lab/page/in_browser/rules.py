"""The rules that hold on every page, as functions of a page that is open: each returns what it
found, the worst first. No test is in here: gate.py and the tools' tests use it.

contrasts, overlaps and the like see what is in sight of a reader now: open, play, refuse first.
rules.js has what runs in the page.
"""

from pathlib import Path

from tests.conftest import ROOT

SCRIPT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
AXE = ROOT / ".venv/axe/node_modules/axe-core/axe.min.js"     # make test-page brings it


def seen(page, name):
    return page.evaluate(f"({SCRIPT.strip()}).{name}()")


def contrasts(page):
    """Every text that is shown: its ratio to what lies behind it, and the least that it may have,
    4.5, or 3 for large text: [{ratio, least, text, where, colors, pixels, times}]. Text of SVG is
    looked at in nine points of its letters: the worst counts; of thousands that are alike, it is
    300. What is inactive (disabled, inert, aria-disabled) is left out, as in WCAG."""
    return seen(page, "contrasts")


def pale(page):
    """Of contrasts, what cannot be read."""
    return [one for one in contrasts(page) if one["ratio"] < one["least"] - 0.005]


def overlaps(page):
    """Texts of charts that are not where they belong: outside of the shape that they stand in, over
    another text, or cut off at the chart's edge: [{what, text, where}]."""
    return seen(page, "overlaps")


def unnamed(page):
    """Links, buttons, inputs, dialogs, pictures without a name, and charts whose name has no number
    of what they show: [{what, name, where}]."""
    return seen(page, "unnamed")


def tab_stops(page):
    """Where Tab stops, in the order of the page."""
    return seen(page, "tabStops")


def shifts(page):
    """What moved without being asked, and what moved within half a second of a click or a key
    (typed): [{value, typed, where}], in order of time."""
    return seen(page, "shifts")


def shift(page):
    """Cumulative layout shift, up to now, moved by an answer to a click or a key too."""
    return sum(one["value"] for one in shifts(page))


def weight(page):
    """{address: bytes that came} of the page and all that it loaded, the heaviest first."""
    return dict(sorted(seen(page, "weight"), key=lambda one: -one[1]))


def moving(page):
    """What is animated now, by CSS or by a script's animate()."""
    return seen(page, "moving")


def timings(page):
    """Milliseconds from the request: to the first that is painted, and to the whole page."""
    return page.evaluate("""() => {
      const [page] = performance.getEntriesByType("navigation");
      const paint = performance.getEntriesByName("first-contentful-paint")[0];
      return { painted: paint?.startTime, complete: page.domComplete };
    }""")


def axe(page, *left_out):
    """What axe-core finds of WCAG 2.1 A and AA: [{rule, where, what}]."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    told = page.evaluate("""rules => axe.run(document, {
        resultTypes: ["violations"], rules,
        runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] })""",
        {rule: {"enabled": False} for rule in left_out})
    return [{"rule": one["id"], "where": node["target"][0], "what": node["failureSummary"]}
            for one in told["violations"] for node in one["nodes"]]
