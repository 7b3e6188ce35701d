"""What a page may weigh, without a browser: tests/lab/page/in_browser/gate.py opens it in one."""

import re

import pytest

from lab.page import reading, tools
from lab.page.server import as_bytes

COURSE = reading.Course()
SITE = COURSE.site()
CHAPTERS = [reading.address_of(name) for name in COURSE.sources if name[0].isdigit()]
PAGES = [f"{name}.html" for name in tools.TOOLS]
MOST = {"index.html": 300_000}                         # bytes; 100,000 are kept for thumbnails


def size(address):
    return len(as_bytes(SITE[address][1]()))


def loaded(address):
    """The page, its scripts and its styles; figures come when they are in sight."""
    html = SITE[address][1]()
    return {address, *re.findall(r'<(?:script|link)[^>]+(?:src|href)="([^"#]+)"', html)} - {
        "icon.svg"}


@pytest.mark.parametrize("address", ["index.html", *CHAPTERS, *PAGES])
def test_a_page_comes_with_little(address):
    sizes = {one: size(one) for one in loaded(address)}
    assert sum(sizes.values()) <= MOST.get(address, 270_000), sizes
