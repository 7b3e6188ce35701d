"""What the tests in a browser share."""

import json
import time
import urllib.request

from tests.conftest import ROOT

SHOTS = ROOT / "runs/page"


def shoot(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def asked(address, question):
    return json.load(urllib.request.urlopen(f"{address}api/{question}"))


def widths(page, bar):
    """{cause: width} of a bar's parts."""
    return dict(page.eval_on_selector_all(
        f"{bar} rect[data-cause]",
        "all => all.map(one => [one.dataset.cause, Number(one.getAttribute('width'))])"))


def verdict(page, words, place=".verdict", timeout=20):
    """Wait until the page's verdict, or another place of it, has these words."""
    end = time.monotonic() + timeout
    while words not in page.inner_text(place):
        assert time.monotonic() < end, page.inner_text(place)
        page.wait_for_timeout(50)
