"""The page without a browser: it is complete, its links lead somewhere, and what it is asked it
answers as the chapters' functions do. (tests/lab/page/in_browser opens it in one.)"""

import http.client
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import unicodedata
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

from lab import museum
from lab.bench.about import as_check
from lab.classroom.exercises import EXERCISES
from lab.page import __main__ as program
from lab.page import answers, figures, markdown, reading, server, tables, tools, typeset
from lab.page.source import HEADING, Source, before_and_now
from lab.sources import SOURCES, texts
from tests.conftest import ROOT

VOID = {"meta", "link", "input", "img", "br", "hr"}


class Page(HTMLParser):
    """An HTML page: its ids, links, and the text of elements of a tag or a class. Raises where an
    element is closed that is not open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.loaded, self.texts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        assert not {name for name in of if name.startswith("on") or name == "style"}, of
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
            if "data-tool" in of:                       # it is no part of the lesson around it
                break

    def of(self, tag, kind=""):
        return [text for name, classes, _, text in self.texts
                if name == tag and (not kind or kind in classes.split())]


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return reading.Course(folder=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def pages(course):
    """{address: Page} of all HTML pages."""
    return {address: Page(make()) for address, (kind, make) in course.site().items()
            if kind.startswith("text/html")}


# ----------------------------------------------------------------------------------------- reading

def test_every_link_leads_somewhere(course, pages):
    site, outside = course.site(), {source.address for source in SOURCES}
    for page in markdown.pages().values():
        outside |= {*re.findall(r"\]\((https://[^)]+)\)", page.text)}
    for address, page in pages.items():
        assert len(set(page.ids)) == len(page.ids), address
        assert {link for link in page.loaded if link not in site} <= {"answers.js"}, address
        for link in page.links:
            where, _, place = link.partition("#")
            if link.startswith("https://github.com/") or link in outside:
                continue
            assert (where or address) in site, (address, link)
            if place and where.removesuffix(".html") not in tools.TOOLS:
                assert place in pages[where or address].ids, (address, link)


def test_every_line_of_every_file_is_there_once(course, pages):
    """As code, or in what is said: a docstring; or as a heading."""
    for name, source in course.sources.items():
        page = pages[reading.address_of(name)]
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
        said = page.of("div", "said")
        for piece in source.pieces:
            assert not piece.said or any(plain(piece.said) in plain(text) for text in said)
        titles = plain("".join(page.of("h1") + page.of("section", "lesson"))).replace(
            plain(course.titles()[name]), plain(source.doc.split("\n\n")[0]), 1)
        assert not Counter(plain(source.doc)) - Counter(titles), name
        for indented, lines in typeset.blocks(source.doc.splitlines()):
            assert indented or plain(" ".join(lines)) in titles, lines


def plain(text):
    """Letters and figures: what stays when a text is typeset. A formula has a root in place of
    sqrt, A with an index in place of A_in, and other signs for a sum and for x."""
    text = unicodedata.normalize("NFKC", text.replace("×", "x")).replace("∑", "Σ")
    return re.sub(r"[\W_]+|sqrt", "", text)


def test_every_word_of_a_block_is_shown_once_and_drawings_stay_as_they_are(course):
    blocks = 0
    for name, source in course.sources.items():
        for said in (source.doc, *(piece.said for piece in source.pieces)):
            for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", said + "\n", re.MULTILINE):
                shown = Page(f"<main>{typeset.typeset(block, source)}</main>")
                text = plain(shown.of("main")[0])
                assert Counter(text) == Counter(plain(block)), name
                assert all(plain(piece) in text for piece in re.split(r"\s{2,}", block)), block
                for drawing in shown.of("pre"):
                    lines = textwrap.dedent(block).splitlines()
                    assert textwrap.dedent(drawing) in map(textwrap.dedent, parts_of(lines)), name
                blocks += 1
    assert blocks > 90


def parts_of(lines):
    """All runs of these lines, each as a text."""
    return ["\n".join(lines[i:j]) for i in range(len(lines)) for j in range(i + 1, len(lines) + 1)]


def test_what_is_said_is_typeset():
    source = Source('def f():\n    """Does."""\n', "x.html")
    html = reading.typeset("Heads. Call `f`, not `g`, for a < b and *never* in chapter 04:\n\n"
                           "    a | b\n\n      - c\nThat is it, chapter 99.", source)
    assert html == (
        '<p><b>Heads.</b> Call <code><a href="x.html#f">f</a></code>, not <code>g</code>, for a '
        '&lt; b and <em>never</em> in chapter <a href="04_tensor_parallel.html">04</a>:</p>\n'
        "<pre tabindex=0>a | b\n\n  - c</pre>\n<p>That is it, chapter 99.</p>")


TEXT = '''"""Title."""
from common import part, other as another

SIZE = 3


# ------ the first

# above it
@decorated
def f(part, x=SIZE):
    """Says
    something."""
    return common.gpt(part(x)) + another + "é" + g(SIZE)


class C:
    """Is."""

    def a(self):
        return self.b() + f(1)

    def b(self):
        """Answers."""
        f = lambda f: f
        return f
'''


def test_a_file_in_pieces_with_links():
    other = Source("\n".join(f"def {name}():\n    pass" for name in ("part", "other", "gpt")),
                   "common.html")
    source = Source(TEXT, "x.html", other)
    assert [(piece.name, piece.heading, piece.said, piece.first, piece.last, piece.functions[1:])
            for piece in source.pieces] == [
        ("", "", "", 2, 4, []), ("f", "the first", "Says\nsomething.", 9, 14, []),
        ("C", "", "Is.", 17, 21, ["C.a"]), ("C.b", "", "Answers.", 23, 26, [])]
    links = re.findall(r'href="([^"]*)" tabindex=-1>(\w+)', "".join(map(source.line, range(1, 27))))
    assert links == [("#L4", "SIZE"), ("common.html#gpt", "gpt"), ("common.html#other", "another"),
                     ("#L4", "SIZE"), ("#C.b", "b"), ("#f", "f")]
    assert source.line(4) == 'SIZE = <span class="number">3</span>'
    assert dict(source.code(source.pieces[1])).keys() == {9, 10, 11, 14}


def test_names_lead_to_their_definitions(course):
    tensor = course.sources["04_tensor_parallel"]
    code = "\n".join(tensor.line(number) for number in range(1, len(tensor.lines) + 1))
    assert re.search(r'href="common.html#keep_shard" tabindex=-1>keep_shard</a>\(linear', code)
    assert re.search(r'href="#CopyIn" tabindex=-1>CopyIn</a>\.apply', code)
    assert re.search(r'common\.<a href="common.html#\w+" tabindex=-1>', code)


def test_before_and_now(course):
    assert before_and_now(["a", "b", "c"], ["a", "x", "c"]) == [
        ("a", "a", False), ("b", "x", True), ("c", "c", False)]
    assert before_and_now(["a", "b"], ["a", "b", "c"])[-1] == (None, "c", True)
    assert before_and_now(["a", "b", "c"], ["x", "y", "z"]) is None
    before = course.before("05_sequence_parallel")
    name, place, rows = before["train_step"]
    assert name == "04_tensor_parallel" and place == "04_tensor_parallel.html#train_step"
    assert [right for _, right, _ in rows if right is not None] == \
        course.sources["05_sequence_parallel"].lines_of("train_step")
    assert any(differs for *_, differs in rows) and not all(differs for *_, differs in rows)
    assert not course.before("00_collectives") and not course.before("common")
    same = [function for name in course.sources
            for function, (_, _, rows) in course.before(name).items() if rows is None]
    assert same                                         # blocks that are repeated on purpose


def test_what_is_written_is_no_markup_of_plain_text(pages):
    """Backticks are code's alone, and what there is one of is said so."""
    for address, page in pages.items():
        text = "".join(page.of("html"))
        drawn = page.of("pre") + page.of("code") + page.of("details", "before")
        for one in sorted(drawn, key=len, reverse=True):
            text = text.replace(one, "")
        assert "`" not in text, (address, text[text.index("`") - 60:][:120])
        assert not re.search(r"\b1 (lines|exercises|silent bugs|ranks|rows)\b", text), address


def test_the_contents_have_every_file_and_what_the_page_has(course, pages):
    page = pages["06_context_parallel.html"]
    listed = [" ".join(text.split()) for text in page.of("a")]
    at = listed.index("06 Context parallelism")
    assert listed[at + 1:at + 4] == ["Lesson", "▸ Rings", "Who holds which tokens"]
    assert "f and g" in pages["05_sequence_parallel.html"].of("h2")    # which are names
    for contents in course.contents().values():
        for name, title in contents.items():
            assert any(text.endswith(title) for text in listed) and len(title) < 40, name
    assert reading.called("04_tensor_parallel", course.contents()) == "04 Tensor parallelism"
    assert "imports: lines 106 to 116" in page.of("summary")
    assert "imports and constants: lines" in "".join(pages["kernels-fp8.html"].of("summary"))


def test_figures_are_light(course):
    """Each picture has the size that its page says, and a page's is whole if it is not tall."""
    for name, figure in reading.figures_of_files().items():
        files = {address: Image.open(io.BytesIO(make()))
                 for address, make in figure.files().items()}
        assert files.keys() <= course.site().keys()
        assert files[figure.address].size == (figure.width, figure.height), name
        address, height = figure.upper
        assert files[address].size == (figure.width, height), name
        assert (address == figure.address) == (2 * figure.height <= figure.width)
        assert files[figure.card].width == 320 and files[figure.card].height <= 180
        assert all(len(make()) < 150_000 for make in figure.files().values()), name
    with Image.open(ROOT / "figures/06_context_parallel.png") as drawn:
        shown = Image.open(io.BytesIO(figures.made("06_context_parallel", figures.whole)))
        away = ImageChops.difference(drawn.convert("RGB"), shown.convert("RGB"))
    assert max(ImageStat.Stat(away).mean) < 1.5         # of 255: fewer colors, and the same picture


def test_a_page_keeps_a_place_for_the_moving_picture(course):
    assert figures.sides("figures/pipeline.svg") == ("830", "524")
    for address in ("index.html", "README.html"):
        _, make = course.site()[address]
        assert 'src="figures/pipeline.svg" width="830" height="524"' in make()


def test_a_new_figure_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    assert figures.figure("new", "") is None
    for when, width in ((1, 30), (2, 50)):
        Image.new("RGB", (width, 20), "red").save(tmp_path / "new.png")
        os.utime(tmp_path / "new.png", (when, when))
        figure = figures.figure("new", "what\n  it shows")
        assert figure.width == width and figure.shows == "what it shows"
        assert Image.open(io.BytesIO(figures.made("new", figures.whole))).width == width


def test_all_exercises_and_all_bugs_are_on_a_page(course, pages):
    asked = [e for exercises in EXERCISES.values() for e in exercises]
    everywhere = "".join("".join(page.of("section", "exercise")) for page in pages.values())
    for exercise in asked:
        assert plain(exercise.question) in plain(everywhere)
        assert all(plain(hint) in plain(everywhere) for hint in exercise.hints)
    assert sum(len(page.of("section", "exercise")) for page in pages.values()) == len(asked)
    bugs = [one for room in museum.exhibits().values() for one in room]
    shown = [text for page in pages.values() for text in page.of("section", "exhibit")]
    assert len(shown) == len(bugs)
    for bug in bugs:
        [text] = [text for text in shown if bug.title in text and bug.number in text]
        assert plain(bug.story) in plain(text) and plain(bug.new) in plain(text)


RUN = {"chapter": "04_tensor_parallel", "variant": "megatron", "world_size": 4, "config": {},
       "recorded": {"timeline": []}, "problems": [], "backend": "gloo", "device": "cpu",
       "dtype": "float32", "seconds": 3.0, "loss": [5.5, 5.25], "reference_loss": [5.5],
       "grad_norm": [1.5, 1.25], "step_seconds": [0.1, 0.2], "max_loss_diff": 1e-7,
       "max_grad_diff": 1e-7, "max_param_diff": 1e-7,
       "checks": [as_check(("states", "parameters"), 800000, 800000, True),
                  as_check(("kept", "activations"), 7, 8, False)]}


def test_the_last_report(course, pages, tmp_path):
    without = "".join(pages["04_tensor_parallel.html"].of("section"))
    assert "make tour" in without and "--json runs/04_tensor_parallel.json" in without
    assert "make tour" in "".join(pages["index.html"].of("section"))
    (tmp_path / "04_tensor_parallel.json").write_text(json.dumps(RUN))
    (tmp_path / "broken.json").write_text('{"chapter": 3}')
    (tmp_path / "plan.json").write_text("[1]")
    with_run = reading.Course(folder=tmp_path)
    page = Page(with_run.chapter("04_tensor_parallel"))
    cells = page.of("td")
    at = cells.index("parameters")
    assert cells[at:at + 4] == ["parameters", "800,000", "800,000", "✓"]
    assert cells[cells.index("activations") + 3] == "✗"
    first = cells.index("5.5000") - 1
    assert ["1", "5.5000", "5.5000", "1.5000", "100"] == cells[first:first + 5]
    assert ["2", "5.2500", "-", "1.2500", "200"] == cells[first + 5:first + 10]
    [summary] = [text for text in page.of("summary") if text.startswith("megatron")]
    assert "✗ activations" in summary and "4 ranks" in " ".join(summary.split())
    assert "megatron" in "".join(Page(with_run.front()).of("pre"))
    of_00 = {key: value for key, value in RUN.items() if "loss" not in key and "diff" not in key}
    (tmp_path / "00.json").write_text(json.dumps(of_00 | {"chapter": "00_collectives"}))
    assert "800,000" in Page(reading.Course(tmp_path).chapter("00_collectives")).of("td")


def test_search_knows_every_function(course):
    entries = json.loads(course.search().removeprefix("window.SEARCH = ").removesuffix(";\n"))
    found = {title: (place, text) for title, place, text in entries}
    place, text = found["06 · meeting"]
    assert place == "06_context_parallel.html#meeting" and "def meeting(runs, keys" in text
    for name, source in course.sources.items():
        for function in source.functions:
            assert f"{reading.label_of(name)} · {function}" in found
    assert {f"exercise {one.number} · {one.what}" for exercises in EXERCISES.values()
            for one in exercises} <= found.keys()


def test_every_row_of_a_text_is_on_its_page_and_search_finds_it(course, pages):
    entries = json.loads(course.search().removeprefix("window.SEARCH = ").removesuffix(";\n"))
    found = {place: (title, text) for title, place, text in entries}
    for source in SOURCES:
        page, rows = pages[f"text-{source.number}.html"], texts.values_of(source.number)
        cells, ids = page.of("td"), tables.anchors(row.where for row, _ in rows)
        assert len(cells) == 5 * len(rows) + len(pages["texts.html"].of("td"))  # of the keys
        for i, ((row, value), anchor) in enumerate(zip(rows, ids)):
            where, what, told, ours, verdict = cells[5 * i:5 * i + 5]
            assert (where, told, verdict) == (row.where, texts.told(row), texts.verdict(row, value))
            assert what.startswith(row.what) and row.why in what and row.by in what
            assert ours == texts.shown(value, row.unit) and anchor in page.ids
            title, text = found[f"text-{source.number}.html#{anchor}"]
            assert row.what in title and row.why in text
            assert row.told is None or texts.told(row) in text
        for what in texts.MODULES[source.number].LEFT_OUT:
            assert what in page.of("li")
    for question in tables.QUESTIONS:
        assert found[f"questions.html#question-{question.number}"][0].endswith(question.question)
        assert question.command in pages["questions.html"].of("code")
    assert len(pages["contradictions.html"].of("section")) == len(tables.CONTRADICTIONS)


def test_pages_of_texts_are_light(course):
    for address, (_, make) in course.site().items():
        if address.startswith(("text", "questions", "contradictions")):
            assert len(make()) < 300_000, address


def test_places_of_a_text_have_anchors_of_their_own():
    assert tables.anchors(["8.3", "ZeRO", "ZeRO-2", "ZeRO", "8.3"]) == [
        "at-8-3", "at-zero", "at-zero-2", "at-zero.2", "at-8-3.2"]


def test_who_gives_a_number_leads_there(course):
    assert tables.linked("03_zero.held, lab.here, x.y", course.sources) == (
        '<code><a href="03_zero.html#held">03_zero.held</a></code>, <code>lab.here</code>, '
        "<code>x.y</code>")


def test_scripts_share_no_name_and_ask_nobody_else(course):
    """They are no modules, which a browser would not load from a file: so a name is everybody's."""
    defines = re.compile(r"^(?:async )?(?:function|class|const|let) (\$*\w*)", re.MULTILINE)
    scripts = sorted(reading.FILES.rglob("*.js"))
    names = [name for path in scripts for name in defines.findall(path.read_text())]
    assert len(names) == len(set(names))
    assert {path.stem for path in tools.FILES.glob("*.js")} == tools.TOOLS.keys() | {"tools"}
    for path in filter(Path.is_file, reading.FILES.rglob("*")):
        text = path.read_text().replace("http://www.w3.org", "")        # SVG's name, not an address
        assert "innerHTML" not in text and not re.search(r"//\w+\.\w+", text), path


# ------------------------------------------------------------------------------------------ serving

@pytest.fixture(scope="module")
def running(course):
    with server.Server(0, lambda: course) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def get(running, path, method="GET", **headers):
    """(status, headers, body) of a request as it stands: no client mends its path."""
    connection = http.client.HTTPConnection(*running.server_address, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    for name, value in ({"Host": f"127.0.0.1:{running.server_port}"} | headers).items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    told = response.status, response.headers, response.read()
    connection.close()
    return told


def test_it_serves_what_it_made(running, course):
    assert running.server_address[0] == "127.0.0.1"     # and no other machine reaches it
    status, headers, body = get(running, "/")
    assert status == 200 and body.decode() == course.front()
    assert headers["Content-Type"].startswith("text/html")
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    status, headers, nothing = get(running, "/", "HEAD")
    assert status == 200 and nothing == b"" and int(headers["Content-Length"]) == len(body)
    assert get(running, "/source/kernels/fp8.py")[2] == (ROOT / "kernels/fp8.py").read_bytes()
    _, headers, picture = get(running, "/figures/fp8.webp")
    assert headers["Content-Type"] == "image/webp" and picture == figures.made("fp8", figures.whole)
    status, headers, body = get(running, "/api/ring?ranks=2")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == answers.QUESTIONS["ring"]({"ranks": "2"})
    status, _, body = get(running, "/api/ring?ranks=99")
    assert status == 400 and json.loads(body)["error"].startswith("ranks = '99'")


@pytest.mark.parametrize("path", [
    "/../README.md", "/figures/../README.md", "/..%2fREADME.md", "//etc/passwd", "/etc/passwd",
    "/source/../README.md", "/source/lab/page/server.py", "/figures/", "/.git/config", "/source",
    "/%00", "/layout.html", "/README.md"])
def test_no_path_reaches_outside(running, path):
    status, _, body = get(running, path)
    assert status == 404 and body == b"there is no such page; / has them all\n"


def test_what_else_it_refuses(running, monkeypatch, capsys):
    assert get(running, "/", Host="evil.example")[0] == 400      # a name that leads to 127.0.0.1
    assert get(running, "/" + "a" * 5000)[0] == 414
    assert get(running, "/", "POST")[0] == 501
    for path in "http://[/", "x://]", "http://[::1":       # of which urlsplit makes nothing
        assert get(running, path)[::2] == (400, b"this is no address\n")
    monkeypatch.setattr(reading.Course, "front", lambda self: 1 / 0)
    status, _, body = get(running, "/")
    assert status == 500 and b"terminal" in body and "ZeroDivisionError" in capsys.readouterr().err


def test_examples_are_what_the_tools_ask_first():
    """Every page has an answer when it is opened."""
    examples = list(answers.examples_but_plans())
    for name, tool in tools.TOOLS.items():
        assert not tool.asks or (tool.asks, tools.asked_first(name, tool.begins)) in examples, name


@pytest.mark.parametrize(("words", "says"), [
    ("--port x", "--port"), ("--port 65536", "--port"), ("--out ''", "--out"), ("site", "site")])
def test_a_bad_argument_costs_one_line(words, says, capsys):
    with pytest.raises(SystemExit) as end:
        program.main(words.replace("''", " ").split(" ") if "''" in words else words.split())
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line


def test_a_port_that_is_taken(running, capsys):
    with pytest.raises(SystemExit) as end:
        program.main(["--port", str(running.server_port)])
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "in use; --port 0 would work" in line


def test_the_search_is_a_program_without_torch():
    code = "import sys, lab.page.search; assert 'torch' not in sys.modules"
    assert not subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).stderr
