"""The pages without a browser: they are complete, and their links resolve. The tests in in_browser
open them in one."""

import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from lab import museum
from lab.classroom.exercises import EXERCISES
from lab.site import markdown, prose, tools
from lab.site import pages as of_the_site
from lab.site.source import HEADING, Source
from lab.texts import SOURCES, shown
from lab.texts.claims import CONTRADICTIONS, DIFFERENCES

VOID = {"meta", "link", "input", "img", "br", "hr"}


class Page(HTMLParser):
    """An HTML page: its ids, its links, what it loads, and the text of elements by tag or class.

    It fails at an element that isn't closed, at a script or a style inside an element, and at a
    picture whose size isn't given: the page would jump when it comes.
    """

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.loaded, self.texts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        assert not {name for name in of if name.startswith("on") or name == "style"}, of
        assert tag != "img" or of.keys() >= {"alt", "width", "height"}, of
        self.ids += [of["id"]] if "id" in of else []
        self.links += [of["href"]] if tag == "a" and "href" in of else []
        self.loaded += [of[name] for name in ("src", "href") if name in of and tag != "a"]
        if tag not in VOID:
            self.open.append((tag, of, []))

    def handle_endtag(self, tag):
        name, of, text = self.open.pop()
        assert name == tag, (name, tag)
        self.texts.append((tag, of.get("class", ""), of.get("id", ""), "".join(text)))

    def handle_data(self, data):
        for _, of, text in reversed(self.open):
            text.append(data)
            if "data-tool" in of:  # a tool is no part of the lesson around it
                break

    def of(self, tag, kind=""):
        return [text for name, classes, _, text in self.texts
                if name == tag and (not kind or kind in classes.split())]


@pytest.fixture(scope="module")
def site():
    return of_the_site.Site()


@pytest.fixture(scope="module")
def pages(site):
    """{address: Page} of all HTML pages."""
    return {address: Page(make()) for address, make in site.files().items()
            if address.endswith(".html")}


# ----------------------------------------------------------------------------------------- reading


def test_every_link_resolves_and_nothing_comes_from_elsewhere(site, pages):
    files, outside = site.files(), {source.address for source in SOURCES}
    for page in markdown.pages().values():
        outside |= {*re.findall(r"\]\((https://[^)]+)\)", page.text)}
    for address, page in pages.items():
        assert len(set(page.ids)) == len(page.ids), address
        assert {link for link in page.loaded if link not in files} <= {"answers.js"}, address
        for link in page.links:
            where, _, place = link.partition("#")
            if link.startswith("https://github.com/") or link in outside:
                continue
            assert (where or address) in files, (address, link)
            if place and where.removesuffix(".html") not in tools.TOOLS:
                assert place in pages[where or address].ids, (address, link)


def test_every_line_of_every_file_is_shown_once(site, pages):
    """As code, as a heading, or in prose: no letter of what a docstring says is lost."""
    for name, source in site.sources.items():
        page = pages[of_the_site.address_of(name)]
        shown = {}
        for tag, _, place, text in page.texts:
            if tag == "span" and re.fullmatch(r"L\d+", place):
                assert place not in shown
                shown[place] = text.removesuffix("\n")
        silent = {n for piece in source.pieces for n in piece.silent}
        first = source.tree.body[0].end_lineno if source.doc else 0
        for number, line in enumerate(source.lines, start=1):
            if f"L{number}" in shown:
                assert shown[f"L{number}"] == f"{number}{line}"
            else:
                assert (not line.strip() or number <= first or number in silent
                        or HEADING.match(line)), (name, number)
        docs = [plain(text) for text in page.of("div", "said")]
        for piece in source.pieces:
            assert not piece.doc or any(plain(piece.doc) in text for text in docs), piece.name
        lesson = plain("".join(page.of("h1") + page.of("section", "lesson")))
        assert not Counter(plain(source.doc)) - Counter(lesson), name


def plain(text):
    """Its letters and digits, which stay when it becomes HTML."""
    return re.sub(r"[\W_]+", "", text)


def test_prose_is_set_in_paragraphs_and_what_is_indented_as_it_is():
    source = Source('"""Title."""\nSIZE = 3\n', "x.html")
    text = """Heads. `SIZE` micro-
batches, *no* more:
    a  <  b

      c

Chapter 04, and chapter 04; tensor- and a_b_c."""
    assert prose.typeset(text, source, {"Heads.": "<hr>"}).split("\n") == [
        '<p><b>Heads.</b> <code><a href="x.html#L2">SIZE</a></code> micro-batches, '
        "<em>no</em> more:</p>",
        "<pre>a  &lt;  b", "", "  c</pre>", "<hr>",
        '<p>Chapter <a href="04_tensor_parallel.html">04</a>, and chapter 04; tensor- and '
        "a_b_c.</p>"]


def test_names_lead_to_their_definitions(site):
    tensor = site.sources["04_tensor_parallel"]
    code = "\n".join(tensor.html)
    for where, name in (("common.html#keep_shard", "keep_shard"), ("#CopyIn", "CopyIn")):
        assert f'href="{where}" tabindex=-1>{name}</a>' in code
    assert re.search(r'common\.<a href="common.html#\w+" tabindex=-1>', code)
    source = Source('"""Title."""\ndef f():\n    return f, x.f\n', "x.html")
    assert "<a " not in source.html[1] and source.html[2].count("<a ") == 1


def test_all_exercises_and_all_bugs_are_on_a_page(pages):
    asked = [e for exercises in EXERCISES.values() for e in exercises]
    everywhere = plain("".join("".join(page.of("section", "exercise")) for page in pages.values()))
    for exercise in asked:
        assert plain(exercise.question) in everywhere
        assert all(plain(hint) in everywhere for hint in exercise.hints)
    assert sum(len(page.of("section", "exercise")) for page in pages.values()) == len(asked)
    bugs = [one for room in museum.exhibits().values() for one in room]
    shown = [text for page in pages.values() for text in page.of("section", "exhibit")]
    assert len(shown) == len(bugs)
    for bug in bugs:
        [text] = [text for text in shown if bug.title in text and bug.number in text]
        assert plain(bug.story) in plain(text) and plain(bug.new) in plain(text)


def test_search_finds_every_function_exercise_and_row(site, pages):
    entries = json.loads(site.search().removeprefix("window.SEARCH = ").removesuffix(";\n"))
    found = {title: (place, text) for title, place, text in entries}
    place, text = found["06 · meeting"]
    assert place == "06_context_parallel.html#meeting" and "def meeting(runs, keys" in text
    for name, source in site.sources.items():
        for function in source.functions:
            assert f"{of_the_site.label_of(name)} · {function}" in found
    assert {f"exercise {one.number} · {one.what}" for exercises in EXERCISES.values()
            for one in exercises} <= found.keys()
    for _, place, _ in entries:
        address, _, anchor = place.partition("#")
        assert not anchor or anchor in pages[address].ids, place


def test_what_the_texts_say_is_on_their_page(pages):
    page = pages["texts.html"]
    for entry, text in zip(CONTRADICTIONS, page.of("section", "question"), strict=True):
        assert shown(entry.ours(), entry.unit) in text
    rows = [row for source in DIFFERENCES.values() for row in source]
    everything = plain("".join(page.of("td")))
    assert all(plain(row.what) in everything and plain(row.why) in everything for row in rows)
