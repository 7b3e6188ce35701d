"""The page without a browser: it's complete, its links resolve, and its server gives what it made.
tests/lab/site/in_browser opens it in one."""

import http.client
import io
import json
import re
import threading
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lab import museum
from lab.classroom.exercises import EXERCISES
from lab.run.about import as_check
from lab.site import __main__ as program
from lab.site import answers, figures, markdown, prose, reading, server, tools
from lab.site.source import HEADING, Source
from lab.texts import SOURCES, shown
from lab.texts.claims import CONTRADICTIONS, DIFFERENCES
from tests.conftest import ROOT

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
def course(tmp_path_factory):
    return reading.Course(folder=tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def pages(course):
    """{address: Page} of all HTML pages."""
    return {address: Page(make()) for address, (kind, make) in course.site().items()
            if kind.startswith("text/html")}


# ----------------------------------------------------------------------------------------- reading


def test_every_link_resolves_and_nothing_comes_from_elsewhere(course, pages):
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


def test_every_line_of_every_file_is_shown_once(course, pages):
    """As code, as a heading, or in prose: no letter of what a docstring says is lost."""
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
        said = [plain(text) for text in page.of("div", "said")]
        for piece in source.pieces:
            assert not piece.said or any(plain(piece.said) in text for text in said), piece.name
        lesson = plain("".join(page.of("h1") + page.of("section", "lesson")))
        assert not Counter(plain(source.doc)) - Counter(lesson), name


def plain(text):
    """Its letters and digits, which stay when it becomes HTML."""
    return re.sub(r"[\W_]+", "", text)


def test_no_backtick_is_left(pages):
    for address, page in pages.items():
        text = "".join(page.of("html"))
        drawn = page.of("pre") + page.of("code") + page.of("details", "before")
        for one in sorted(drawn, key=len, reverse=True):
            text = text.replace(one, "")
        assert "`" not in text, (address, text[text.index("`") - 60:][:120])


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
        "<pre tabindex=0>a  &lt;  b", "", "  c</pre>", "<hr>",
        '<p>Chapter <a href="04_tensor_parallel.html">04</a>, and chapter 04; tensor- and '
        "a_b_c.</p>"]


def test_names_lead_to_their_definitions(course):
    tensor = course.sources["04_tensor_parallel"]
    code = "\n".join(map(tensor.line, range(1, len(tensor.lines) + 1)))
    for where, name in (("common.html#keep_shard", "keep_shard"), ("#CopyIn", "CopyIn")):
        assert f'href="{where}" tabindex=-1>{name}</a>' in code
    assert re.search(r'common\.<a href="common.html#\w+" tabindex=-1>', code)
    source = Source('"""Title."""\ndef f(f):\n    return f + "é"\n', "x.html")
    assert "<a " not in source.line(3)  # an argument hides the function of that name


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


RUN = {"chapter": "04_tensor_parallel", "variant": "megatron", "world_size": 4, "config": {},
       "recorded": {"timeline": []}, "problems": [], "backend": "gloo", "device": "cpu",
       "dtype": "float32", "seconds": 3.0, "loss": [5.5, 5.25], "reference_loss": [5.5],
       "grad_norm": [1.5, 1.25], "step_seconds": [0.1, 0.2], "max_loss_diff": 1e-7,
       "max_grad_diff": 1e-7, "max_param_diff": 1e-7,
       "checks": [as_check(("states", "parameters"), 800000, 800000, True),
                  as_check(("kept", "activations"), 7, 8, False)]}


def test_the_last_report(pages, tmp_path):
    without = "".join(pages["04_tensor_parallel.html"].of("section"))
    assert "--json runs/04_tensor_parallel.json" in without
    (tmp_path / "04_tensor_parallel.json").write_text(json.dumps(RUN))
    (tmp_path / "broken.json").write_text('{"chapter": 3}')
    with_run = reading.Course(folder=tmp_path)
    cells = Page(with_run.chapter("04_tensor_parallel")).of("td")
    at = cells.index("parameters")
    assert cells[at:at + 4] == ["parameters", "800,000", "800,000", "✓"]
    assert cells[cells.index("activations") + 3] == "✗"
    first = cells.index("5.5000") - 1
    assert ["1", "5.5000", "5.5000", "1.5000", "100"] == cells[first:first + 5]
    assert ["2", "5.2500", "-", "1.2500", "200"] == cells[first + 5:first + 10]
    assert "megatron" in "".join(Page(with_run.front()).of("pre"))


def test_search_finds_every_function_exercise_and_row(course, pages):
    entries = json.loads(course.search().removeprefix("window.SEARCH = ").removesuffix(";\n"))
    found = {title: (place, text) for title, place, text in entries}
    place, text = found["06 · meeting"]
    assert place == "06_context_parallel.html#meeting" and "def meeting(runs, keys" in text
    for name, source in course.sources.items():
        for function in source.functions:
            assert f"{reading.label_of(name)} · {function}" in found
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
    assert sum(name.startswith("at-row-") for name in page.ids) == len(rows)
    everything = plain("".join(page.of("td")))
    assert all(plain(row.what) in everything and plain(row.why) in everything for row in rows)


@pytest.mark.full
def test_figures_have_the_size_that_their_page_gives(course):
    Image = pytest.importorskip("PIL.Image")
    for figure in reading.figures_of_files().values():
        files = {address: Image.open(io.BytesIO(make()))
                 for address, make in figure.files().items()}
        assert files.keys() <= course.site().keys()
        assert files[figure.address].size == (figure.width, figure.height), figure.name
        address, height = figure.upper
        assert files[address].size == (figure.width, height), figure.name


# ------------------------------------------------------------------------------------------- tools


def test_scripts_share_no_name_and_ask_nobody_else():
    """A browser loads no modules from a folder, so all scripts share their names."""
    defines = re.compile(r"^(?:async )?(?:function|class|const|let) (\$*\w*)", re.MULTILINE)
    scripts = sorted(reading.FILES.rglob("*.js"))
    names = [name for path in scripts for name in defines.findall(path.read_text())]
    assert len(names) == len(set(names))
    assert {path.stem for path in tools.FILES.glob("*.js")} == tools.TOOLS.keys() | {"tools"}
    for path in filter(Path.is_file, reading.FILES.rglob("*")):
        text = path.read_text().replace("http://www.w3.org", "")  # SVG's name, not an address
        assert "innerHTML" not in text and not re.search(r"//\w+\.\w+", text), path


def test_what_a_tool_asks_first_is_stored(course):
    """On its own page and in each lesson, so that it has an answer where nobody computes."""
    stored = list(answers.examples_but_plans())
    begins = [(name, {}) for name in tools.TOOLS] + [
        played for name in course.sources for played in tools.plays(name).values()]
    for name, more in begins:
        tool = tools.TOOLS[name]
        asked = tools.asked_first(name, tool.begins | more)
        assert not tool.asks or (tool.asks, asked) in stored, (name, more)


# ----------------------------------------------------------------------------------------- serving


@pytest.fixture(scope="module")
def running(course):
    with server.Server(0, lambda: course) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def get(running, path, method="GET", **headers):
    """(status, headers, body) of a request as it is: no client mends its path."""
    connection = http.client.HTTPConnection(*running.server_address, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    for name, value in ({"Host": f"127.0.0.1:{running.server_port}"} | headers).items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    told = response.status, response.headers, response.read()
    connection.close()
    return told


def test_it_serves_what_it_made(running, course):
    assert running.server_address[0] == "127.0.0.1"  # so no other machine reaches it
    status, headers, body = get(running, "/")
    assert status == 200 and body.decode() == course.front()
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    status, headers, nothing = get(running, "/", "HEAD")
    assert status == 200 and nothing == b"" and int(headers["Content-Length"]) == len(body)
    assert get(running, "/source/kernels/fp8.py")[2] == (ROOT / "kernels/fp8.py").read_bytes()
    _, headers, picture = get(running, "/figures/fp8.webp")
    assert headers["Content-Type"] == "image/webp" and picture == figures.made("fp8", figures.whole)
    status, _, body = get(running, "/api/ring?ranks=2")
    assert status == 200 and json.loads(body) == answers.QUESTIONS["ring"]({"ranks": "2"})
    status, _, body = get(running, "/api/ring?ranks=99")
    assert status == 400 and "99" in json.loads(body)["error"]


def test_what_it_refuses(running, monkeypatch, capsys):
    for path in ("/../README.md", "/figures/../README.md", "/..%2fREADME.md", "//etc/passwd",
                 "/source/../README.md", "/source/lab/site/server.py", "/figures/", "/.git/config",
                 "/%00", "/layout.html", "/README.md"):
        assert get(running, path)[0] == 404, path
    assert get(running, "/", Host="evil.example")[0] == 400  # a name that leads to 127.0.0.1
    assert get(running, "/" + "a" * 5000)[0] == 414
    assert get(running, "/", "POST")[0] == 501
    for path in "http://[/", "x://]", "http://[::1":  # urlsplit refuses these
        assert get(running, path)[0] == 400
    monkeypatch.setattr(reading.Course, "front", lambda self: 1 / 0)
    assert get(running, "/")[0] == 500 and "ZeroDivisionError" in capsys.readouterr().err


def test_a_bad_argument_costs_one_line(running, capsys):
    for flags, says in ((["--port", "65536"], "--port"), (["--out", ""], "--out"),
                        (["site"], "site"), (["--port", str(running.server_port)], "--port 0")):
        with pytest.raises(SystemExit) as end:
            program.main(flags)
        [line] = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and line.startswith("error: ") and says in line
