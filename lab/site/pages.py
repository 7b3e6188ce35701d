"""The site's pages as HTML: chapters, tools, texts, the front page; and the index of search."""

import json
import re
from functools import cache, partial
from pathlib import Path

import jinja2
from markupsafe import Markup

from lab import ROOT, chapters, museum, pictures
from lab.classroom.exercises import EXERCISES
from lab.site import answers, figures, markdown, tables, tools
from lab.site.prose import inline, typeset
from lab.site.source import Source, before_and_now

FILES = Path(__file__).parent / "files"
LINKED = ("fivefold.ipynb", "CITATION.cff", "LICENSE", "lab/deploy/fivefold.sbatch",
          "lab/deploy/restart.sbatch")       # what pages link to and show as it is


@cache
def files_to_read():
    """{name: path} of the course's files, in the order of reading."""
    first, *more = chapters.NAMES
    names = first, "common", *more, *beside_chapters()
    return {name: ROOT / f"{name}.py" for name in names}


@cache
def beside_chapters():
    """{name: its figure or None} of the files that are read after the chapters."""
    found = {}
    for about in chapters.rooms_with("about").values():
        found |= getattr(about, "FILES", {})
    return found


def address_of(name):
    """The page of a file: kernels/fp8 is kernels-fp8.html."""
    return f"{name.replace('/', '-')}.html"


def label_of(name):
    """A file's short name: "04" of a chapter."""
    return name[:2] if name[0].isdigit() else name.split("/")[-1]


@cache
def templates():
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(FILES), autoescape=True,
                              trim_blocks=True, lstrip_blocks=True,
                              undefined=jinja2.StrictUndefined)
    made.filters |= {"typeset": typeset, "inline": inline, "address": address_of,
                     "label": label_of, "thread": thread, "thread_id": thread_id,
                     "linked": tables.linked, "counted": counted, "headline": headline}
    made.globals["tool"] = partial(mount, begins={}, large=True)
    return made


def mount(name, begins, large=False):
    """A tool's HTML, on its own page (large) or in a lesson, which brings the first answers."""
    tool = tools.TOOLS[name]
    begins = tool.begins | begins
    first = [] if large else answers.first_questions(tool, begins)
    stored = [(tools.written(question, asked), json.dumps(answers.answer(question, asked)))
              for question, asked in first]
    return Markup(templates().get_template("mount.html").render(
        tool=tool, begins=begins, large=large, answers=stored))


class Site:
    """All pages, made of the files as they are now."""

    def __init__(self):
        texts = {name: path.read_text(encoding="utf-8")
                 for name, path in files_to_read().items()}
        common = Source(texts["common"], address_of("common"))
        self.sources = {name: Source(text, address_of(name), common)
                        for name, text in texts.items()}
        self.sources["common"] = common
        self.titles = {name: split_title(source.doc)[0] for name, source in self.sources.items()}

    def files(self):
        """{address: function that makes it}: all that there is, but for the tools' answers."""
        files = {"index.html": self.front, "texts.html": self.texts, "search.js": self.search,
                 "choices.js": choices}
        for name, path in files_to_read().items():
            files[address_of(name)] = partial(self.chapter, name)
            files[f"source/{name}.py"] = path.read_bytes
        for tool in tools.TOOLS:
            files[f"{tool}.html"] = partial(self.render, f"{tool}.html", here=tool, mounts=[tool])
        for path in FILES.rglob("*"):
            if path.suffix in (".js", ".css", ".svg"):
                files[path.relative_to(FILES).as_posix()] = path.read_bytes
        for path in (*figures.FOLDER.iterdir(), *(ROOT / name for name in LINKED)):
            files[path.relative_to(ROOT).as_posix()] = path.read_bytes
        pages = markdown.pages().values()
        known = {*files, *(page.address for page in pages)}
        return files | {page.address: partial(self.written, page, known) for page in pages}

    def render(self, template, here, mounts=(), parts=(), **more):
        """A page. mounts: the tools on it. parts: [(anchor, title)] for the contents."""
        return templates().get_template(template).render(
            here=here, mounts=mounts, parts=parts, tools=tools.TOOLS, contents=self.contents(),
            course=markdown.grouped(), **more)

    def contents(self):
        """{group of the contents: {name: its title, up to a colon}}."""
        short = {name: title.split(":")[0] for name, title in self.titles.items()}
        beside = {name: short.pop(name) for name in beside_chapters()}
        return {"Chapters": short, "Beside them": beside}

    def front(self):
        files = [{"name": name, "title": title, "lines": self.sources[name].lines,
                  "exercises": EXERCISES.get(name, ()), "exhibits": self.exhibits(name),
                  "figure": figure_of(name)} for name, title in self.titles.items()]
        return self.render("front.html", here="index", files={file["name"]: file for file in files})

    def chapter(self, name):
        source, order = self.sources[name], list(self.sources)
        title, lesson = split_title(source.doc)
        exhibits, exercises = self.exhibits(name), EXERCISES.get(name, ())
        plays = getattr(chapters.about(name), "PLAYS", {})
        headings = [piece.heading for piece in source.pieces if piece.heading]
        parts = [("lesson", "Lesson")] if lesson else []
        parts += [(f"play-{tool}", f"▸ {tools.TOOLS[tool].title}") for tool, _ in plays.values()]
        parts += [(f"section-{i}", headline(one)) for i, one in enumerate(headings, start=1)]
        parts += [("exercises", "Exercises")] if exercises else []
        parts += [("museum", "Silent bugs")] if exhibits else []
        at = order.index(name)
        return self.render(
            "chapter.html", here=name, mounts=sorted({tool for tool, _ in plays.values()}),
            parts=parts, source=source, title=title, lesson=lesson, plays=plays,
            number=label_of(name) if name[0].isdigit() else None, figure=figure_of(name),
            beside={start: mount(tool, begins) for start, (tool, begins) in plays.items()},
            before=self.before(name), exercises=exercises, exhibits=exhibits,
            room=room_of(exhibits), titles=self.titles, earlier=order[at - 1] if at else None,
            later=order[at + 1] if at + 1 < len(order) else None)

    def written(self, page, known):
        """A page of pages/. known: the addresses that its links may lead to."""
        sections = markdown.sections(page, known)
        parts = [(one.anchor, one.title) for one in sections if one.title]
        return self.render("written.html", here=page.name, page=page, sections=sections,
                           parts=parts)

    def texts(self):
        return self.render("texts.html", here="texts", entries=tables.contradictions(),
                           differences=tables.differences(), sources=self.sources)

    def before(self, name):
        """{function: (chapter, address, rows of before_and_now, or None: it is the same)} of what
        the last chapter before this one has under the same name."""
        if not name[0].isdigit():
            return {}
        earlier = {}
        for other in [one for one in self.sources if one[0].isdigit() and one < name]:
            earlier |= dict.fromkeys(self.sources[other].functions, other)
        shown, source = {}, self.sources[name]
        for function in earlier.keys() & source.functions:
            other = self.sources[earlier[function]]
            lines, now = other.lines_of(function), source.lines_of(function)
            rows = None if lines == now else before_and_now(lines, now)
            if rows or lines == now:
                shown[function] = earlier[function], other.place(function), rows
        return shown

    def exhibits(self, name):
        """The museum's silent bugs that are planted in this file, or that belong beside it."""
        rooms = museum.exhibits()
        planted = [one for room in rooms.values() for one in room if one.file == f"{name}.py"]
        if name != "lab/checkpoints/checkpoint":
            return planted
        shown = {f"{name}.py" for name in self.sources}
        return planted + [one for one in rooms["checkpoints"] if one.file not in shown]

    def search(self):
        """The index of search: [title, address, text] of lessons, functions, exercises, exhibits,
        pages, and the five texts."""
        entries = []
        for name, source in self.sources.items():
            page, label = address_of(name), label_of(name)
            entries.append([f"{label} · {self.titles[name]}", f"{page}#lesson", source.doc])
            entries += [[f"{label} · {function}", f"{page}#{function}",
                         "\n".join(source.lines[first - 1:last])]
                        for function, (first, last) in source.functions.items()]
            entries += [[f"exercise {one.number} · {one.what}", f"{page}#exercise-{one.number}",
                         one.question] for one in EXERCISES.get(name, ())]
            entries += [[f"bug in {label} · {one.title}", f"{page}#{thread_id(one)}",
                         f"{one.number} {one.story}"] for one in self.exhibits(name)]
        for page in markdown.pages().values():
            entries += [[f"{page.short} · {one.title}".removesuffix(" · "),
                         f"{page.address}#{one.anchor}".removesuffix("#"), one.text]
                        for one in markdown.sections(page, ())]
        entries += [[f"does not hold · {entry.says}", "texts.html", f"{entry.holds}"]
                    for entry in tables.CONTRADICTIONS]
        return f"window.SEARCH = {json.dumps(entries, ensure_ascii=False)};\n"


def choices():
    """The script that says what the tools offer."""
    return f"window.CHOICES = {json.dumps(answers.choices())};\n"


def headline(heading):
    """With a capital first, unless it begins with a name, such as f or all_reduce."""
    first, *_ = heading.split()
    is_name = first != "a" and re.search(r"^\w$|[_`]", first)
    return heading if is_name else heading[:1].upper() + heading[1:]


def counted(things, one):
    """In words: "1 exercise", "3 exercises"."""
    return f"{len(things)} {one}" if len(things) == 1 else f"{len(things)} {one}s"


def room_of(exhibits):
    """The museum's room of the first of them."""
    rooms = museum.exhibits().items()
    return next((room for room, all_in_it in rooms if {*exhibits[:1]} & {*all_in_it}), None)


def split_title(doc):
    """(title, the rest) of a docstring. A long first paragraph is both, its beginning the title."""
    first, _, rest = doc.partition("\n\n")
    title = re.sub(r"^\d\d · ", "", first.replace("\n", " "))
    if len(title) > 100:
        title, rest = re.split(r"[:.]", title)[0], doc
    return title.rstrip("."), rest


def thread_id(exhibit):
    """An exhibit's anchor: a thread can have several, in different files."""
    return re.sub(r"\W+", "-", f"bug-{exhibit.number}-{exhibit.title}").lower().strip("-")


def thread(exhibit):
    """The address of the thread that describes it."""
    repository, number = exhibit.number.split("#")
    return f"https://github.com/{repository}/issues/{number}"


def figure_of(name):
    """The Figure of a file, with what the function that draws it says, or else a page; or None."""
    file = beside_chapters().get(name, name)
    drawn = pictures.FIGURES.get(name)
    caption = drawn.draw.__doc__ if drawn else markdown.captions().get(file, "")
    return figures.figure(file, caption) if file else None
